"""Engines with different kernels behind one router: a stream stays with those it began with as long as an engine has them, and
where it cannot, its answer says so.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from ops import _cpu
from tests.e2e.engine_process import GOLDEN
from tests.e2e.router_process import Cluster
from tests.e2e.workload import Answer, answers, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S, wait_until

BODIES = mixed_bodies(8, seed=51, max_tokens=600, max_prompt=40)
VARIANTS = (_cpu.variants()[0], _cpu.candidates()[-1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if len({*VARIANTS}) == 1:
        pytest.skip(f"engines with different kernels: only {VARIANTS[0]} is built here")
    options = ("--max-model-len", "800", "--restart-limit", "100", "--threads", "1", "--dtype", "bfloat16")
    found = Cluster(tmp_path_factory.mktemp("cluster"), GOLDEN / "qwen3", *options)
    for engine, variant in zip(found.engines, VARIANTS, strict=True):
        engine.command += ["--cpu-kernels", variant]
    found.router.command += ["--allow-mixed-kernels"]
    with found:
        yield found


def content(answer: Answer) -> tuple[list[int], list[float]]:
    return answer.token_ids, answer.token_logprobs


@pytest.fixture(scope="module")
def truth(cluster: Cluster) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Answers of each engine at its own address, by the router's number of what it computes."""
    found = [[content(answer) for answer in answers(engine, BODIES)] for engine in cluster.engines]
    assert found[0] != found[1]
    (answer,) = answers(cluster.router, BODIES[:1])
    first = [each[0] for each in found].index(content(answer))
    return {answer.weight_version: found[first], "2" if answer.weight_version == "1" else "1": found[1 - first]}


def test_each_answer_has_the_bytes_of_one_engine(
    cluster: Cluster, truth: dict[str, list[tuple[list[int], list[float]]]]
) -> None:
    found = answers(cluster.router, BODIES * 2, concurrency=len(BODIES))
    assert {answer.weight_version for answer in found} == {*truth}
    for index, answer in enumerate(found):
        assert content(answer) == truth[answer.weight_version][index % len(BODIES)]


def test_a_stream_that_must_cross_says_so(cluster: Cluster, truth: dict[str, list[tuple[list[int], list[float]]]]) -> None:
    """An engine dies for good: its streams continue with other kernels."""

    async def run() -> list[Answer]:
        arrived = asyncio.Semaphore(0)
        running = asyncio.create_task(stream_all(cluster.router.url, BODIES, len(BODIES), arrived.release))
        for _ in range(2 * len(BODIES)):
            await asyncio.wait_for(arrived.acquire(), WATCHDOG_S)
        cluster.engines[1].process.send_signal(signal.SIGKILL)  # its actors end with it
        return await running

    found = asyncio.run(run())
    crossed = [answer for answer in found if "," in answer.weight_version]
    assert crossed
    assert all(answer.finish_reason == "length" for answer in found)
    wait_until(lambda: cluster.router.metric("streams_crossed_total") >= len(crossed), what="crossings are counted")
    for index, answer in enumerate(found):
        if answer not in crossed:
            assert content(answer) == truth[answer.weight_version][index]
