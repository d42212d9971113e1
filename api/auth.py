"""Who may use `/v1`, `/tokenize` and `/detokenize`: holders of one of the API keys; and with which priority.

Called in the api process, by `app.Gate` for every request and by `client/submission.py` for those that generate.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from engine.config import EngineConfig
from engine.errors import RequestError

PROTECTED_PATHS = ("/tokenize", "/detokenize")
PROTECTED_PREFIX = "/v1/"


def check_access(path: str, headers: Headers, api_keys: Sequence[str]) -> None:
    """401 for a protected path without a key. Without configured keys everything is open."""
    if not api_keys or not (path.startswith(PROTECTED_PREFIX) or path in PROTECTED_PATHS):
        return
    if not has_key(headers, api_keys):
        raise RequestError(
            "wrong or missing API key; send it as `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
        )


def key_of(headers: Headers, keys: Sequence[str]) -> str:
    """Which of `keys` the bearer token is, in a time that depends on neither; empty where it is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip().encode("latin-1")
    matches = [key for key in keys if hmac.compare_digest(given, key.encode())]
    return matches[0] if matches and scheme.lower() == "bearer" else ""


def has_key(headers: Headers, keys: Sequence[str]) -> bool:
    """Whether the bearer token is one of `keys`."""
    return bool(key_of(headers, keys))


def priority_of(headers: Headers, asked: int | None, config: EngineConfig) -> int:
    """With which priority a request runs that asks for `asked`: a key's own priority is the best that its requests get.
    400 where requests may not choose."""
    if asked and not config.request_priority:
        raise RequestError(
            f"priority: {asked}, but this server takes none from requests (--no-request-priority); leave it out",
            code="invalid_value",
            param="priority",
        )
    best = dict(config.api_key_priority).get(key_of(headers, config.api_key))
    if best is None:
        return asked or 0
    return best if asked is None else max(best, asked)
