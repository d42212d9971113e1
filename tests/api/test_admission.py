"""Connections are shared among client addresses, and /health is answered beyond all limits."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.admission import MAX_SURPLUS, Admission
from engine.errors import RequestError
from tests.api.api_server import ApiServer
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

COMPLETION = b"/v1/completions"


class Guest:
    def __init__(self) -> None:
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True


def enter(admission: Admission, host: str, num_times: int) -> list[Guest]:
    """Return the host's connections that are admitted."""
    guests = [Guest() for _ in range(num_times)]
    return [guest for guest in guests if admission.enter(guest, host)]


def test_address_leaves_as_many_as_it_takes() -> None:
    admission = Admission(32)
    assert len(enter(admission, "10.0.0.1", 40)) == 16
    assert len(enter(admission, "10.0.0.2", 40)) == 8
    assert len(enter(admission, "10.0.0.3", 1)) == 1


@pytest.mark.parametrize(
    ("one", "other", "num_other"),
    [("::ffff:10.0.0.1", "10.0.0.1", 0), ("2001:db8::1", "2001:db8::2", 0), ("2001:db8::1", "2001:db8:0:1::1", 2)],
)
def test_addresses_of_one_user_share(one: str, other: str, num_other: int) -> None:
    admission = Admission(32, max_per_address=2)
    assert len(enter(admission, one, 3)) == 2
    assert len(enter(admission, other, 3)) == num_other


def test_proxies_and_unix_sockets_have_no_share() -> None:
    admission = Admission(12, max_per_address=2, proxies=("10.1.0.0/16",))
    assert len(enter(admission, "10.1.2.3", 5)) == 5
    assert len(enter(admission, "", 5)) == 5
    assert len(enter(admission, "10.2.0.0", 5)) == 2


def test_surplus_is_refused_until_there_is_room() -> None:
    admission = Admission(4, max_per_address=2)
    (first, _) = enter(admission, "a", 2)
    surplus = Guest()
    assert not admission.enter(surplus, "a")
    for path in (b"/health", b"/health/live?x=1"):
        admission.check(surplus, path)
    with pytest.raises(RequestError, match="--max-connections-per-address") as caught:
        admission.check(surplus, COMPLETION)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    admission.leave(first)
    admission.check(surplus, COMPLETION)
    assert not admission.is_surplus(surplus)
    late = Guest()
    assert not admission.enter(late, "a")
    with pytest.raises(RequestError):
        admission.check(late, COMPLETION)


def test_oldest_surplus_is_cut() -> None:
    admission = Admission(1)
    enter(admission, "a", 1)
    surplus = [Guest() for _ in range(MAX_SURPLUS + 1)]
    for guest in surplus:
        assert not admission.enter(guest, "a")
    assert [guest.is_cut for guest in surplus] == [True] + MAX_SURPLUS * [False]


@contextlib.contextmanager
def connections(server: ApiServer, number: int, host: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(number):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(WATCHDOG_S)
            connection.bind((host, 0))
            connection.connect(("127.0.0.1", server.port))
            made.append(connection)
        yield made


def test_one_address_cannot_shut_out_another(tmp_path: Path) -> None:
    with ApiServer(tmp_path, max_connections=8) as server:
        with connections(server, 40):
            wait_until(lambda: server.post("/v1/completions", {"prompt": "x"}).status_code == 429, what="its share taken")
            refused = server.post("/v1/completions", {"prompt": "x"})
            assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("too_many_connections", "1")
            health = server.get("/health")
            assert (health.status_code, health.headers["connection"]) == (200, "close")
            other = httpx.HTTPTransport(local_address="127.0.0.2")
            with httpx.Client(transport=other, timeout=WATCHDOG_S) as client:
                assert client.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 5}).status_code == 200
        wait_until(lambda: server.post("/v1/completions", {"prompt": "x", "max_tokens": 5}).status_code == 200, what="room")


def test_health_is_answered_when_all_connections_are_taken(tmp_path: Path) -> None:
    with (
        ApiServer(tmp_path, max_connections=3, max_connections_per_address=2) as server,
        connections(server, 2, "127.0.0.2"),
        connections(server, 2, "127.0.0.3"),
    ):
        wait_until(lambda: server.get("/v1/models").status_code == 503, what="all taken")
        assert server.get("/health/live").status_code == 200
        assert server.get("/health").status_code == 200


def test_trusted_proxy_forwards_the_client_address(tmp_path: Path) -> None:
    """An address that the client writes itself does not count."""
    with ApiServer(tmp_path, trusted_proxies=("127.0.0.0/8",)) as server:

        def source(*forwarded: str) -> str:
            headers = [("x-forwarded-for", text) for text in forwarded]
            answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers)
            (submit,) = server.peer.submits(answer.headers["x-request-id"])
            return submit.source

        assert len({source(), source("10.0.0.1"), source("10.0.0.2")}) == 3
        assert source("10.9.9.9, 10.0.0.1") == source("10.0.0.1, 127.0.0.5") == source("10.0.0.7", "10.0.0.1")
        assert source("nonsense") == source()


def test_few_descriptors_mean_few_connections() -> None:
    program = "\n".join(
        (
            "import json, resource",
            "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))",
            "from api.server import connections_that_fit",
            "print(json.dumps(connections_that_fit(1024)))",
        )
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, timeout=WATCHDOG_S, check=True)
    num_connections, num_spare = json.loads(ran.stdout)
    assert 100 < num_connections < 256 - MAX_SURPLUS - num_spare
    assert num_spare > 50
