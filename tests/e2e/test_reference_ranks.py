"""Ranks with reference ops, which exchange tensors in groups of Paddle's processes: golden outputs, of pictures too, and a rank
that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_golden import TOLERANCE, body_of, golden_cases
from tests.e2e.test_pictures import with_pictures
from tests.e2e.workload import answers, answers_together, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S

RANKS = ("worker0", "worker1")
BODIES = mixed_bodies(4, seed=7, max_tokens=20, max_prompt=40)  # no placeholders among them
LAYOUTS = [
    ("qwen3_vl", ("-tp", "2"), ["worker1"]),
    ("qwen3_moe", ("-dp", "2", "--enable-expert-parallel"), ["worker0", "worker1"]),
]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout[0])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str], EngineProcess]]:
    architecture, layout, victims = request.param
    options = ("--ops", "reference", "--max-model-len", "400", "--threads", "1", *layout)
    with EngineProcess(GOLDEN / architecture, *options) as engine:
        yield architecture, victims, engine


def test_golden(served: tuple[str, list[str], EngineProcess]) -> None:
    architecture, _, engine = served
    cases = golden_cases(architecture)
    bodies = [with_pictures(architecture, case) if "images" in case else body_of(case) for case in cases]
    for case, answer in zip(cases, answers_together(engine, bodies), strict=True):
        assert answer.token_ids == case["greedy_token_ids"]
        assert answer.token_logprobs == pytest.approx([best[0][1] for best in case["top_logprobs"]], abs=TOLERANCE)
    for rank in RANKS:
        assert engine.metric("collectives_total", actor=rank) > 0


def test_rank_group_is_restarted_as_a_whole(served: tuple[str, list[str], EngineProcess]) -> None:
    """Any of its ranks dies in the middle of steps, or all at once: each time that is one death and costs no byte."""
    _, victims, engine = served
    expected = answers(engine, BODIES)
    before, restarts = engine.actors(), engine.metric("actor_restarts_total")

    async def disturbed() -> None:
        flowing = asyncio.Event()
        streams = asyncio.create_task(stream_all(engine.url, BODIES, 4, flowing.set))
        await asyncio.wait_for(flowing.wait(), timeout=WATCHDOG_S)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):  # the supervisor was faster
                os.kill(int(before[victim]["pid"]), signal.SIGKILL)
        for rank in RANKS:
            await asyncio.to_thread(engine.wait_for_restart, rank, int(before[rank]["epoch"]))
        assert await streams == expected

    asyncio.run(disturbed())
    after = engine.actors()
    for name, row in after.items():
        assert row["epoch"] == before[name]["epoch"] + (name in RANKS), name
        assert (row["pid"] != before[name]["pid"]) == (name in RANKS), name
    assert engine.metric("actor_restarts_total") == restarts + 1
