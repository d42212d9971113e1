"""The UNIX socket of `--uds`, on which the engine listens instead of a port: created by the supervisor and kept until it ends.

Every api process inherits it and accepts connections from it; while one restarts, connections wait in the queue. The file of a
dead engine refuses connections, and is removed by the next start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.errors import StartError

BACKLOG = 2048


@contextlib.contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """Listen at `path` from now on; remove its file at the end. Raises StartError if another process listens, or if `path`
    cannot be used."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            with _locked(Path(path).parent):
                remove_dead(path)
                listener.bind(path)
            inode = os.stat(path).st_ino
            listener.listen(BACKLOG)
        except OSError as error:
            raise StartError(_explain(path, error)) from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:  # it was not replaced meanwhile
                    os.unlink(path)


def remove_dead(path: str) -> None:
    """Remove a socket without a listener. Raises OSError if it cannot be removed."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.setblocking(False)  # a full queue means that there is a listener
                client.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            return


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory: two processes that find the same dead socket would remove each other's new one."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _explain(path: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--uds {path} is in use: another program listens on it, or it is not a socket; use another path"
    return f"cannot listen on --uds {path}: {error.strerror or error}; use another path of at most 107 bytes"
