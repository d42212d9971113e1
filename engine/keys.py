"""Keys and other secrets: what is stored, and where.

Of keys that clients send (API, admin), the configuration, the manifest and all processes hold only digests; the key of a
request is compared by its digest. The secret with which the api process signs links to an object store is needed as it is: it
reaches that process in its environment, never in a file. Secrets on the command line are readable by every user of the machine,
so the launcher overwrites them once it has read them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from shm.blake2 import blake2b

_SIGNING = ("object_store_secret_key", "object_store_session_token")  # fields of the configuration
_VARIABLE = "TOKAMAK_RUN_SECRETS"  # JSON, in the environment of api processes
_READ_BY_LAUNCHER = ("API_KEY", "API_KEY_PRIORITY", "ADMIN_KEY", "OBJECT_STORE_SECRET_KEY", "OBJECT_STORE_SESSION_TOKEN")
_HIDDEN = (_VARIABLE, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", *(f"TOKAMAK_{name}" for name in _READ_BY_LAUNCHER))
_OPTIONS = tuple(f"--{name.lower().replace('_', '-')}" for name in _READ_BY_LAUNCHER)
_MIN_ABBREVIATION = len("--ap")
_ARG_START, _ARG_END = 45, 46  # of /proc/PID/stat, counted after the name


def key_digest(key: str | bytes) -> str:
    """Return the blake2b digest of a key as 64 hexadecimal digits; empty for no key."""
    data = key.encode() if isinstance(key, str) else key
    return blake2b(data, digest_size=32).hexdigest() if data else ""


def without_secrets(config: EngineConfig) -> EngineConfig:
    """Return the configuration without secrets, which may be written to a file."""
    return msgspec.structs.replace(config, **dict.fromkeys(_SIGNING, ""))


def with_secrets(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """Return the configuration with the secrets again, in a process that got them from `environment_of`."""
    secrets = msgspec.json.decode(environment.get(_VARIABLE, "{}"), type=dict[str, str])
    return msgspec.structs.replace(config, **secrets) if secrets else config


def environment_of(config: EngineConfig, role: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an actor, with only those secrets that its role needs."""
    kept = {name: value for name, value in environment.items() if name not in _HIDDEN}
    secrets = {name: value for name in _SIGNING if (value := getattr(config, name))}
    if role == "api" and secrets:
        kept[_VARIABLE] = msgspec.json.encode(secrets).decode()
    return kept


def hide_arguments() -> None:
    """Overwrite the secrets in this process's command line, as /proc shows it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    place, is_secret = start, False
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        name, equals, value = argument.partition(b"=")
        if argument.startswith(b"--"):
            is_secret = _is_secret(name.decode(errors="replace").replace("_", "-"))
        if is_secret and (equals or not argument.startswith(b"--")):
            hidden = value if argument.startswith(b"--") else argument
            ctypes.memset(place + len(argument) - len(hidden), ord("*"), len(hidden))
        place += len(argument) + 1


def _is_secret(option: str) -> bool:
    return len(option) >= _MIN_ABBREVIATION and any(name.startswith(option) for name in _OPTIONS)
