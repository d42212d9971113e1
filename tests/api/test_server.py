"""The api process's life: SIGTERM, SIGKILL and a new epoch, limits on connections."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path

import httpx
import pytest

from api.body_budget import FREE_BYTES, LARGEST_BODIES
from engine.messages import ActorState
from shm.counters import State
from tests.api.api_server import ApiServer
from tests.api.tokenizer_peer import DEFAULT_NUM_TOKENS, said_text
from tests.waiting import WATCHDOG_S, wait_until


def test_ready_is_announced(server: ApiServer) -> None:
    ready = wait_until(lambda: [event for event in server.events if isinstance(event, ActorState)], what="its event")
    assert [(event.actor, event.state) for event in ready] == [("api0", "READY")]


def test_running_state_means_open_sequences(server: ApiServer) -> None:
    row = server.counters.actor("api0")
    wait_until(lambda: row.state == State.READY, what="idle")
    with server.paced(1):
        lines: list[str] = []
        reading = stream(server, lines)
        wait_until(lambda: row.state == State.RUNNING, what="busy")
    reading.join()
    wait_until(lambda: row.state == State.READY, what="idle again")


def stream(server: ApiServer, into: list[str]) -> threading.Thread:
    """Read a stream's body into `into`, in a thread."""

    def read() -> None:
        body = {"prompt": "x", "stream": True, "max_tokens": DEFAULT_NUM_TOKENS}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WATCHDOG_S) as response:
            into.extend(response.iter_lines())

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_open_streams_may_end_on_sigterm(tmp_path: Path) -> None:
    with ApiServer(tmp_path, stop_timeout_s=10 * WATCHDOG_S) as server, server.paced(10):
        lines: list[str] = []
        reading = stream(server, lines)
        wait_until(lambda: server.count("generation_tokens_total") == 10, what="ten tokens")
        idle = socket.create_connection(("127.0.0.1", server.port))
        server.child.terminate()
        wait_until(lambda: server.counters.actor("api0").state == State.DRAINING, what="draining")
        server.peer.credits = None
        reading.join()
        assert server.child.wait(WATCHDOG_S) == 0
        idle.close()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert sum(line.count('"finish_reason":"length"') for line in lines) == 1
        assert server.counters.actor("api0").state == State.STOPPED


def test_endless_streams_end_at_shutdown(tmp_path: Path) -> None:
    """Streams end with an error that says so and an abort for the engine; a client that does not read is disconnected."""
    with ApiServer(tmp_path, stop_timeout_s=1.5) as server, server.paced(10):
        lines: list[str] = []
        reading = stream(server, lines)
        wait_until(lambda: server.count("generation_tokens_total") == 10, what="ten tokens")
        server.child.terminate()
        assert server.child.wait(WATCHDOG_S) == 0
        reading.join()
        last_but_one, last = [line for line in lines if line][-2:]
        assert "shutting_down" in last_but_one
        assert last == "data: [DONE]"
        wait_until(lambda: len(server.peer.aborts()) == 1, what="aborted")


def test_killed_api_process_is_restarted(tmp_path: Path) -> None:
    with ApiServer(tmp_path) as server:
        server.child.kill()
        server.child.wait()
        server.start_child(2)
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 5}).json()
        assert answer["choices"][0]["text"] == said_text(5)
        assert server.peer.submits()[-1].api_epoch == 2


@pytest.mark.slow
def test_surplus_connections_are_closed(tmp_path: Path) -> None:
    with ApiServer(tmp_path, max_connections=4, max_body_bytes=100) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG_S))
            surplus = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG_S))
            received = b"?"
            with contextlib.suppress(ConnectionResetError):
                received = surplus.recv(1)
            assert received in (b"", b"?")
        wait_until(lambda: has_room(server), what="room again")
        assert server.post("/v1/completions", {"prompt": "x" * 200}).status_code == 413


def has_room(server: ApiServer) -> bool:
    try:
        return server.get("/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_large_bodies_share_a_budget(tmp_path: Path) -> None:
    """Eight of the largest bodies fit; a later large one is refused, and a small one is served."""
    most, sent = 200_000, 190_000
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {most}\r\n\r\n"
    )
    with ApiServer(tmp_path, max_body_bytes=most) as server, contextlib.ExitStack() as stack:
        num_fitting = LARGEST_BODIES * most // (sent - FREE_BYTES)
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG_S))
            for _ in range(num_fitting + 1)
        ]
        for client in clients:
            client.sendall(head.encode() + b" " * sent)
        refused = select.select(clients, [], [], WATCHDOG_S)[0]
        assert [client.recv(12) for client in refused] == [b"HTTP/1.1 503"]
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 5}).status_code == 200
        for client in clients:
            client.close()
        wrong = {"prompt": "x" * sent, "max_tokens": -1}
        wait_until(lambda: server.post("/v1/completions", wrong).status_code == 400, what="room for large ones")
