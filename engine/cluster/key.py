"""The cluster key: one secret file, from which both ends of every connection derive their CURVE keys.

`tokamak key FILE` makes it; it is copied to each machine. A router proves with the key pair of routers that it has the file,
and an engine with the key pair of engines. The key is in no argument, log, manifest or message: processes read the file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from engine.errors import OptionError
from shm.blake2 import blake2b

_KEY_BYTES = 32
_HEAD = "tokamak-cluster-key-1 "


class CurveKeys(msgspec.Struct, frozen=True):
    """Keys of CURVE, as ZeroMQ takes them: 40 characters of Z85."""

    engine_public: bytes
    engine_secret: bytes
    router_public: bytes
    router_secret: bytes


def make_key_file(path: Path) -> None:
    """Write a new key to `path`, which must not exist, with mode 0600. Raises OptionError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        hint = "; remove it first, or use it as it is" if isinstance(error, FileExistsError) else ""
        raise OptionError(f"cannot make the key file {path}: {error.strerror}{hint}") from error
    with open(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(f"{_HEAD}{os.urandom(_KEY_BYTES).hex()}\n")


def read_key_file(path: str | Path) -> CurveKeys:
    """Return the keys derived from a cluster key file. Raises OptionError if it cannot be read, is not one, or if other users
    can read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor) as file:
            status = os.fstat(descriptor)
            text = file.read(len(_HEAD) + 2 * _KEY_BYTES + 2) if stat.S_ISREG(status.st_mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not text"
        raise OptionError(f"cannot read the cluster key file {path}: {cause}; make one with `tokamak key`") from error
    mode = stat.S_IMODE(status.st_mode)
    if is_exposed(mode, status.st_uid, os.geteuid()):
        raise OptionError(f"other users can use the cluster key file {path} (mode {mode:o}); make it mode 600")
    key = b""
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(text.removeprefix(_HEAD).strip()) if text.startswith(_HEAD) else b""
    if len(key) != _KEY_BYTES:
        raise OptionError(f"{path} is not a cluster key file; make one with `tokamak key`")
    return _derived(key)


def is_exposed(mode: int, owner: int, user: int) -> bool:
    """Return whether other users can use a file with these permissions. Root may give its file to the group of the process,
    as Kubernetes does with a mounted secret."""
    is_given = owner == 0 != user
    return bool(mode & (0o037 if is_given else 0o077))


def _derived(key: bytes) -> CurveKeys:
    import zmq
    from zmq.utils import z85

    secrets = [z85.encode(blake2b(role, digest_size=_KEY_BYTES, key=key).digest()) for role in (b"engine", b"router")]
    engine_secret, router_secret = secrets
    return CurveKeys(zmq.curve_public(engine_secret), engine_secret, zmq.curve_public(router_secret), router_secret)
