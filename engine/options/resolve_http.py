"""Options that an engine and a router have alike: the address of the API (a port or a UNIX socket, with TLS or without, below a
path), keys, traces, and those that are taken as they are. Used by `resolve.py` and `resolve_router.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.keys import key_digest
from engine.options.table import OptionValues
from engine.process.run_directory import API_NAME

# fields of every configuration, of an engine and of a router, that are their options unchanged; the latter in seconds
OF_RUNS = (
    "data_parallel_routing",
    "max_waiting",
    "request_priority",
    "api_processes",
    "tokenizer_processes",
    "restart_limit",
    "host",
    "port",
    "allowed_hosts",
    "allowed_origins",
    "max_body_bytes",
    "max_files_size",
    "max_files_size_per_user",
    "max_connections",
    "max_connections_per_address",
    "trusted_proxies",
    "print_client",
    "log_level",
    "log_format",
    "log_requests",
    "metrics_prefix",
    "trace",
)
SECONDS_OF_RUNS = (
    "request_timeout",
    "restart_window",
    "hang_timeout",
    "load_timeout",
    "stop_timeout",
    "sse_keep_alive_interval",
)

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def resolve_http(options: OptionValues, run_dir: str) -> dict[str, Any]:
    """Return fields of the configuration for a run in that directory. Raises OptionError for a certificate that cannot be
    used."""
    values = options.values
    root_path = values["root_path"].rstrip("/")
    if not _ROOT_PATH.fullmatch(root_path):
        raise OptionError(f"--root-path {values['root_path']}: expected a URL path prefix, such as /llm")
    uds = str(Path(run_dir, API_NAME)) if values["uds"] == "auto" else values["uds"]
    if uds and values["print_client"] != "none":
        raise OptionError(f"--print-client {values['print_client']} does not work with a UNIX socket (--uds); remove one")
    ignored = [f"--{key}" for key in ("host", "port") if uds and key in options.given]
    if ignored:
        options.notes.append(f"{' and '.join(ignored)} has no effect: the engine listens only on the socket {uds} (--uds)")
    files = {key: values[key] for key in ("ssl_keyfile", "ssl_certfile")}
    _check_certificate(**files)
    return {"root_path": root_path, "uds": uds, **files}


def resolve_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the digests of the keys that clients send. Raises OptionError for a priority of an unknown key."""
    _check_key_priorities(values["api_key_priority"], values["api_key"])
    return {
        "api_key": tuple(map(key_digest, values["api_key"])),
        "api_key_priority": tuple((key_digest(key), priority) for key, priority in values["api_key_priority"]),
        "admin_key": key_digest(values["admin_key"]),
    }


def resolve_tracing(endpoint: str) -> str:
    """Return the collector of traces; empty: none is given."""
    if not endpoint:
        return ""
    from engine.options.resolve_collector import resolve_collector

    return resolve_collector(endpoint)


def _check_key_priorities(priorities: tuple[tuple[str, int], ...], keys: tuple[str, ...]) -> None:
    """Check keys with priorities. Messages do not contain keys, because they end up in logs."""
    for number, (key, priority) in enumerate(priorities, 1):
        if key not in keys:
            raise OptionError(
                f"--api-key-priority: key {number}, with priority {priority}, is not one of the {len(keys)} keys in "
                "--api-key; add it there or remove it here"
            )
    if len(dict(priorities)) < len(priorities):
        raise OptionError("--api-key-priority: a key is given twice; give each key one priority")


def _check_certificate(ssl_keyfile: str, ssl_certfile: str) -> None:
    if not ssl_keyfile and not ssl_certfile:
        return
    if not ssl_certfile:
        raise OptionError(f"--ssl-keyfile {ssl_keyfile} needs a certificate; add --ssl-certfile")
    import ssl  # only where it is used

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(ssl_certfile, ssl_keyfile or None, password=lambda: "")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = f"--ssl-certfile {ssl_certfile}" + (f" with --ssl-keyfile {ssl_keyfile}" if ssl_keyfile else "")
        why = getattr(error, "strerror", None) or error
        raise OptionError(f"{files}: {why}; expected a certificate and its key in PEM format, without a password") from None
