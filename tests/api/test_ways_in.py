"""Other ways to the API than a bare port: TLS, a UNIX socket, a path prefix behind a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from api.admission import MAX_SURPLUS
from engine.errors import StartError
from engine.supervisor.unix_socket import remove_dead, unix_socket
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import said_text
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.connection import Client
from tools.chat.conversation import Conversation
from tools.target import Target

TLS = Path(__file__).with_name("tls")
CERTIFICATE = TLS / "certificate.pem"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    files = {"ssl_keyfile": str(TLS / "key.pem"), "ssl_certfile": str(CERTIFICATE)}
    with ApiServer(tmp_path_factory.mktemp("run"), **files, root_path="/llm") as running:
        yield running


@pytest.fixture(scope="module")
def on_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with (
        tempfile.TemporaryDirectory(prefix="tokamak-test-") as directory,  # a socket's path may have 107 bytes
        ApiServer(tmp_path_factory.mktemp("run"), uds=f"{directory}/api.sock") as running,
    ):
        yield running


def over(server: ApiServer) -> httpx.Client:
    """Return a client of a server, however it is reached."""
    if server.config.uds:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=server.config.uds), base_url="http://localhost", timeout=WATCHDOG_S
        )
    trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
    return httpx.Client(verify=trusted, base_url=server.url, timeout=WATCHDOG_S)


@pytest.mark.parametrize("way", ["secure", "on_socket"])
def test_the_openai_client(request: pytest.FixtureRequest, way: str) -> None:
    server: ApiServer = request.getfixturevalue(way)
    with over(server) as http, openai.OpenAI(base_url=http.base_url.join("/v1"), api_key="-", http_client=http) as client:
        whole = client.completions.create(model="tiny", prompt="x", max_tokens=30)
        pieces = client.completions.create(model="tiny", prompt="x", max_tokens=30, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text == said_text(30)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_invalid_http_is_answered_over_tls(secure: ApiServer) -> None:
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    with secure.connection() as plain, context.wrap_socket(plain, server_hostname="localhost") as client:
        client.sendall(b"nonsense\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 400"
    asking = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with secure.connection(asking) as plain, contextlib.suppress(ConnectionResetError):
        assert not plain.recv(1 << 16).startswith(b"HTTP")


def test_silent_handshakes_count_and_block_no_other(tmp_path: Path) -> None:
    """Connections that never begin TLS count like others, and only against their own address."""
    files = {"ssl_keyfile": str(TLS / "key.pem"), "ssl_certfile": str(CERTIFICATE)}
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    asking = b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

    def ask(server: ApiServer, address: str, path: bytes) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", server.port), WATCHDOG_S, source_address=(address, 0)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(asking % path)
            return client.recv(12)

    with (
        ApiServer(tmp_path, **files, max_connections=40, max_connections_per_address=20) as server,
        contextlib.ExitStack() as stack,
    ):

        def num_open() -> int:
            return len(os.listdir(f"/proc/{server.child.pid}/fd"))

        ask(server, "127.0.0.2", b"/version")
        before = num_open()
        silent = [stack.enter_context(server.connection()) for _ in range(100)]
        wait_until(lambda: 20 < num_open() - before <= 24 + MAX_SURPLUS, what="surplus connections are cut")
        assert ask(server, "127.0.0.1", b"/health") == b"HTTP/1.1 200"
        assert ask(server, "127.0.0.1", b"/version") == b"HTTP/1.1 429"
        assert ask(server, "127.0.0.2", b"/version") == b"HTTP/1.1 200"
        for connection in silent:
            connection.close()
        wait_until(lambda: num_open() <= before, what="all are gone")
        assert ask(server, "127.0.0.1", b"/version") == b"HTTP/1.1 200"
        stack.enter_context(server.connection())  # at its end the server does not wait for it


def test_a_root_path_that_the_proxy_leaves_on(secure: ApiServer) -> None:
    with over(secure) as http:
        for path in ("/llm/v1/models", "/v1/models"):
            assert http.get(path).json()["data"][0]["id"] == "tiny"
        assert http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert http.get("/llm/llm/v1/models").status_code == 404
        assert http.get("/llm/admin/actors").status_code == 401
        page = http.get("/llm/")
        assert page.status_code == 200
        assert 'fetch("/' not in page.text


def test_clients_that_leave_a_socket(on_socket: ApiServer) -> None:
    """A slow reader is handled there as well; host names do not matter."""
    body = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: any.example\r\nx-request-id: gone\r\ncontent-length: %d\r\n\r\n"
    with on_socket.paced(3):
        with on_socket.connection(head % len(body) + body) as client:
            assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: on_socket.peer.aborts("gone~"), what="aborted")


def test_command_line_tools_use_the_socket(on_socket: ApiServer) -> None:
    target = Target.parse(f"unix:{on_socket.config.uds}")
    conversation = Conversation(target, "tiny", "", {"max_tokens": 20})
    assert "".join(piece.text for piece in conversation.ask("hi")) == said_text(20)

    async def ask() -> tuple[int, bytes]:
        client = Client(target, WATCHDOG_S)
        try:
            return await client.get("/v1/models")
        finally:
            client.close()

    status, models = asyncio.run(ask())
    assert (status, b"tiny" in models) == (200, True)


def test_restarted_process_accepts_waiting_connections(on_socket: ApiServer) -> None:
    on_socket.child.kill()
    on_socket.child.wait()
    with on_socket.connection(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n") as early:
        on_socket.start_child(2)
        assert early.recv(12) == b"HTTP/1.1 200"


def test_socket_in_use_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="tokamak-test-") as directory:
        path = f"{directory}/api.sock"
        with unix_socket(path):
            with pytest.raises(StartError, match="in use"), unix_socket(path):
                pass
            remove_dead(path)
            assert os.path.exists(path)
        assert not os.path.exists(path)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        with unix_socket(path):  # its owner was killed
            pass
        Path(path).write_text("of somebody")
        with pytest.raises(StartError, match="not a socket"), unix_socket(path):
            pass
        assert Path(path).read_text() == "of somebody"
        for wrong in (f"{directory}/{'x' * 120}", f"{directory}/none/api.sock"):
            with pytest.raises(StartError, match="another path"), unix_socket(wrong):
                pass
