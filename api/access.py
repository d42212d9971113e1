"""Access to routes: checks a request's host name, origin and key, and sets its priority.

Called in the api process, by `app.App` for every request and by `submission.py` for those that generate. A browser on this
machine runs the code of any page it shows, and can reach this server like any local program. Two headers that such code cannot
choose identify it:

    Host      a foreign name that a DNS server points here (DNS rebinding). A server on the loopback interface answers to
              localhost and to addresses, and to --allowed-hosts; one on another interface to any name, unless that is given.
    Origin    the page's origin. It must be this server, another server on this machine (a chat page that its user started
              here) or one of --allowed-origins; they may also read answers (CORS). /admin accepts only pages of this server.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.keys import key_digest

PROTECTED_PATHS = ("/tokenize", "/detokenize", "/dashboard", "/score", "/rerank", "/v2/rerank", "/pooling", "/classify")
PROTECTED_PREFIXES = ("/v1/", "/api/", "/dashboard/")
ADMIN_PREFIX = "/admin"
ADMIN_PATHS = (  # paths of vLLM and FastDeploy
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/clear_load_weight",
    "/update_model_weight",
)
GIVEN_KEY = "tokamak.given"  # in the scope of a request that this server sends itself: `Given`
LOCAL_ORIGIN = r"https?://(localhost|[a-z0-9-]+\.localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
_NUM_REMEMBERED = 256  # recent names and addresses; nearly every request has one of them
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")


class Given(NamedTuple):
    """Source and priority of a request of this server itself, which has no headers and no address."""

    source: str
    priority: int


class Access:
    def __init__(self, config: EngineConfig) -> None:
        self._api_keys = config.api_key
        self._admin_key = config.admin_key
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        is_local = _is_local(config.host) and not config.uds  # browsers cannot reach a UNIX socket
        self._is_any_host_allowed = "*" in self._hosts or not (self._hosts or is_local)
        self.origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)

    def check(self, path: str, headers: Headers) -> None:
        """Raise 400, 401 or 403 if the request is not allowed."""
        self._check_host(headers.getlist("host"))
        origin = headers.get("origin")
        if origin is not None and not self.is_shared(path, origin) and not _is_same(origin, headers.get("host", "")):
            where = "this server; start it with --allowed-origins"
            if _is_admin(path):
                where = path if path in ADMIN_PATHS else ADMIN_PREFIX
            raise _forbidden(f"pages from origin {origin[:256]!r} may not use {where}")
        if _is_admin(path):
            self._check_admin(headers)
        elif path.startswith(PROTECTED_PREFIXES) or path in PROTECTED_PATHS:
            self._check_api_key(headers)

    def is_shared(self, path: str, origin: str) -> bool:
        """Return whether pages of `origin`, on this machine or in --allowed-origins, may use `path` and read the answer."""
        is_allowed = "*" in self.origins or origin in self.origins or re.fullmatch(LOCAL_ORIGIN, origin) is not None
        return is_allowed and not _is_admin(path)

    def _check_host(self, given: Sequence[str]) -> None:
        """Check the Host header. A request without one (HTTP/1.0) does not come from a browser."""
        match = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if given and match is None:
            raise RequestError("host: expected NAME or NAME:PORT", code="invalid_value", param="host")
        if match is None or self._is_any_host_allowed:
            return
        name = match["name"].lower().rstrip(".")
        if not _is_local(name) and not _is_address(name) and name not in self._hosts:
            raise _forbidden(f"host {name!r} is not allowed; start the server with --allowed-hosts {name}")

    def _check_api_key(self, headers: Headers) -> None:
        if self._api_keys and not _key_of(headers, self._api_keys):
            raise _unauthorized("API", "invalid_api_key")

    def _check_admin(self, headers: Headers) -> None:
        if not self._admin_key:
            raise _forbidden(
                "/admin is disabled; start the server with --admin-key, or use `tokamak ctl`, which has its own socket"
            )
        if not _key_of(headers, (self._admin_key,)):
            raise _unauthorized("admin", "invalid_admin_key")


def priority_of(request: HTTPConnection, asked: int | None, config: EngineConfig) -> int:
    """Return the priority of a request that asks for `asked`: the priority of a key is the best that its requests get. Raises
    400 if requests may not choose."""
    if asked and not config.request_priority:
        raise RequestError(
            f"priority {asked} is not allowed, because priorities are disabled (--no-request-priority); remove it",
            code="invalid_value",
            param="priority",
        )
    given: Given | None = request.scope.get(GIVEN_KEY)
    if given is not None:
        return given.priority
    best = dict(config.api_key_priority).get(_key_of(request.headers, config.api_key))
    if best is None:
        return asked or 0
    return best if asked is None else max(best, asked)


def source_of(request: HTTPConnection, config: EngineConfig) -> str:
    """Return the source of a request: a hash of its key, or of its address if there is no key. Empty: unknown."""
    given: Given | None = request.scope.get(GIVEN_KEY)
    if given is not None:
        return given.source
    key = _key_of(request.headers, config.api_key)
    return _source(f"key {key}") if key else _source_at(_client_of(request, config.trusted_proxies))


def owner_of(directory: Path, source: str) -> str:
    """Return 8 hexadecimal digits that represent a source in the names of its files in `directory`. They differ between runs,
    and reveal nothing about an address."""
    return hashlib.blake2b(f"{directory}\0{source}".encode(), digest_size=4).hexdigest()


def _client_of(request: HTTPConnection, proxies: tuple[str, ...]) -> str:
    """Return the address of a client, perhaps behind trusted proxies: each appends the address it sees to X-Forwarded-For."""
    host = request.client.host if request.client else ""
    if not is_within(host, proxies):
        return host
    forwarded = [part.strip() for text in request.headers.getlist("x-forwarded-for") for part in text.split(",")]
    for address in reversed(forwarded):
        if not _is_address(address):
            break  # not written by one of our proxies
        host = address
        if not is_within(address, proxies):
            break
    return host


@lru_cache(_NUM_REMEMBERED)
def is_within(host: str, networks: tuple[str, ...]) -> bool:
    """Return whether an address is in one of the networks."""
    if not networks:
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:  # a dual-stack socket
        address = address.ipv4_mapped
    return any(address in ipaddress.ip_network(network) for network in networks)


def _source(owner: str) -> str:
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest() if owner else ""


@lru_cache(_NUM_REMEMBERED)
def _source_at(host: str) -> str:
    return _source(neighbourhood(host))


def neighbourhood(host: str) -> str:
    """Return the network of addresses that counts as one user: a single IPv4 address, or all 2^64 of an IPv6 network. Behind a
    translator (RFC 6052) all of IPv4 is one such network, but each of its addresses is another user."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:  # a dual-stack socket
        return str(address.ipv4_mapped)
    if address in _TRANSLATED:
        return str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


def _key_of(headers: Headers, digests: Sequence[str]) -> str:
    """Return the one of `digests` that matches the bearer token or `x-api-key`, in constant time; empty: none."""
    if not digests:
        return ""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    tokens = [token.strip()] if scheme.lower() == "bearer" else []
    given = [key_digest(text.encode("latin-1")) for text in (*tokens, *headers.getlist("x-api-key"))]
    matches = [digest for digest in digests for one in given if hmac.compare_digest(one, digest)]
    return matches[0] if matches else ""


def _is_admin(path: str) -> bool:
    return path.startswith(ADMIN_PREFIX) or path in ADMIN_PATHS


@lru_cache(_NUM_REMEMBERED)
def _is_local(name: str) -> bool:
    """Return whether a name or address never leaves this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name.strip("[]")).is_loopback


@lru_cache(_NUM_REMEMBERED)
def _is_address(name: str) -> bool:
    """Return whether this is a numeric address: no DNS server can point it elsewhere."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_same(origin: str, host: str) -> bool:
    return bool(host) and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _unauthorized(kind: str, code: str) -> RequestError:
    remedy = "send the key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return RequestError(f"missing or invalid {kind} key; {remedy}", status=401, code=code)


def _forbidden(message: str) -> RequestError:
    return RequestError(message, status=403, code="forbidden")
