"""Pictures and video through a router: inspected there, sent once to the engine that encodes them, and encoded again
elsewhere when a process dies. The answers are golden outputs of a third party.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.cluster.frames import Piece
from engine.cluster.key import read_key_file
from tests.e2e.engine_process import GOLDEN
from tests.e2e.router_process import Cluster
from tests.e2e.test_golden import golden_cases, with_pictures
from tests.e2e.test_pictures import ANSWERS, check_golden, with_video
from tests.e2e.test_router import Peer
from tests.waiting import WATCHDOG_S, wait_until

MODEL = "qwen2_5_vl"
KILLED = ((-1, "link"), (-1, "media0"), (0, "media0"), (0, "link"), (1, "scheduler"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--dtype", "float32", "--max-model-len", "400", "--restart-limit", "100", "--threads", "1")
    with Cluster(tmp_path_factory.mktemp("cluster"), GOLDEN / MODEL, *options) as found:
        yield found


def requests() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return bodies and what their answers must be: pictures, and pictures with a video."""
    cases = [(with_pictures(MODEL, case), case) for case in golden_cases(MODEL)]
    return [*cases, (with_video(MODEL), ANSWERS[MODEL])]


def ask(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{cluster.router.url}/v1/completions", json=body, timeout=WATCHDOG_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def ask_all(cluster: Cluster, times: int = 1) -> None:
    """Ask everything at once, and check the answers."""
    cases = requests() * times
    with ThreadPoolExecutor(len(cases)) as pool:
        for choice, (_, case) in zip(pool.map(lambda case: ask(cluster, case[0]), cases), cases, strict=True):
            check_golden(choice, case)


def received_bytes(cluster: Cluster) -> float:
    return sum(engine.metric("link_received_bytes_total") for engine in cluster.engines)


def test_golden_outputs(cluster: Cluster) -> None:
    ask_all(cluster, times=3)


def test_a_file_travels_once(cluster: Cluster) -> None:
    """Another question about a picture needs its bytes on no engine that has them."""
    body, case = requests()[-1]
    for _ in range(2):
        check_golden(ask(cluster, body), case)
    before = received_bytes(cluster)
    check_golden(ask(cluster, body), case)
    assert received_bytes(cluster) - before < 8_000


def test_damaged_pictures_are_refused(cluster: Cluster) -> None:
    body = requests()[0][0] | {"multi_modal_data": {"image": ["data:image/png;base64,AAAA"]}}
    answer = httpx.post(f"{cluster.router.url}/v1/completions", json=body, timeout=WATCHDOG_S)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(("index", "actor"), KILLED)
def test_pictures_survive_kills(cluster: Cluster, index: int, actor: str) -> None:
    victim = cluster.engines[index] if index >= 0 else cluster.router
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_all, cluster, 2)
        victim.wait_for_restart(actor, victim.kill(actor, signal.SIGKILL))
        asking.result()
    cluster.wait_for(2)
    wait_until(cluster.is_idle, what="the engines hold nothing")


def test_pieces_that_nobody_wants(cluster: Cluster) -> None:
    """They cost nothing; a piece that is too large costs the session."""
    with Peer(cluster, read_key_file(cluster.key)) as peer:
        peer.greet()
        peer.say(Piece(bytes(32), 0, 0, b"x" * 1000))
        peer.say(Piece(b"", 7, -1, b""))
        peer.say(Piece(bytes(32), 0, 0, b"x" * (300 << 10)))
        assert "the limit is" in peer.farewell()
    ask_all(cluster)
