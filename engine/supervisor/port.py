"""The engine's TCP port, taken by the supervisor before anything else starts and held for the engine's life.

Every api process listens on it with SO_REUSEPORT. That option would also let a second engine of the same user share the port by
mistake. So the supervisor first binds without it, which fails if there is any listener, and then holds the port with a socket
that never listens: it gets no connections, admits our api processes, and makes the first bind of every other engine fail.
"""

from __future__ import annotations

import errno
import socket

from engine.errors import StartError


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket bound to `host`:`port` (0: any free port) that holds it. Raises StartError if the port is busy or not
    allowed."""
    family, address = _resolve(host, port)
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # connections of an earlier server in TIME_WAIT do not prevent this bind; a listener still does
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            chosen = (address[0], probe.getsockname()[1], *address[2:])
        return _hold(family, chosen)
    except OSError as error:
        raise StartError(_explain(host, port, error)) from error


def _hold(family: socket.AddressFamily, address: tuple[str | int, ...]) -> socket.socket:
    try:
        return _bind_shared(family, address, 0)
    except OSError:
        # connections of an earlier, foreign server in TIME_WAIT admit a holder that sets SO_REUSEADDR while it binds
        holder = _bind_shared(family, address, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return holder


def _bind_shared(family: socket.AddressFamily, address: tuple[str | int, ...], reuse_address: int) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
        holder.bind(address)
    except OSError:
        holder.close()
        raise
    return holder


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str | int, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartError(f"--host {host} is not an address of this machine: {error}; try 127.0.0.1 or 0.0.0.0") from error
    family, _, _, _, address = found[0]
    return family, tuple(part for part in address if not isinstance(part, bytes))


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program or another Tokamak; choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges (below 1024); choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; try 127.0.0.1 or 0.0.0.0"
    return f"cannot use port {port} on {host}: {error.strerror}; choose another with --port or --host"
