"""The engine's port: shared with its own api processes only."""

from __future__ import annotations

import socket

import pytest

from engine.errors import StartError
from engine.supervisor.port import reserve_port


def api_socket(port: int) -> socket.socket:
    """Return a listener as api processes make it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def test_only_own_api_processes_share_the_port() -> None:
    with reserve_port("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            reserve_port("127.0.0.1", port)
        with api_socket(port), api_socket(port), pytest.raises(StartError, match="is in use"):
            reserve_port("127.0.0.1", port)
        with pytest.raises(StartError, match="is in use"):
            reserve_port("0.0.0.0", port)
        with api_socket(port) as listener, socket.create_connection(("127.0.0.1", port)) as client:
            connection, address = listener.accept()  # never the holder
            connection.close()
            assert address == client.getsockname()
    reserve_port("127.0.0.1", port).close()


@pytest.mark.parametrize("reuse", [0, 1])
def test_lingering_connections_do_not_block_the_port(reuse: int) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = server.accept()
            connection.close()  # this side closes first, so it keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    with reserve_port("127.0.0.1", port) as holder:
        assert holder.getsockname()[1] == port
        with pytest.raises(StartError, match="is in use"):
            reserve_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "said"),
    [("no.such.host.invalid", "not an address of this machine"), ("192.0.2.1", "not an address of this machine")],
)
def test_hosts_that_are_not_this_machine(host: str, said: str) -> None:
    with pytest.raises(StartError, match=said):
        reserve_port(host, 0)


def test_ipv6() -> None:
    with reserve_port("::1", 0) as holder:
        assert holder.family == socket.AF_INET6
