"""Who may use `/v1`, `/tokenize` and `/detokenize`: holders of one of the API keys. Called by `app.Gate` in the api process."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

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


def has_key(headers: Headers, keys: Sequence[str]) -> bool:
    """Whether the bearer token is one of `keys`, in a time that depends on neither."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip().encode("latin-1")
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(matches)
