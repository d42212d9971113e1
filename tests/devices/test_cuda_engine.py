"""Engines with `--device gpu` on an emulated card: no Paddle in any process, the bytes of each request alone across chunks,
caching, preemption, drafts, kills, sleep and reload, op by op and captured, with adapters, on one rank and on two, with shared
experts too. Engines with layers that draft are in `tests/tools/test_device_card.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import write_adapter
from tests.devices.card_engine import engine_on_card
from tests.devices.engines import (
    BODIES,
    CAPTURED,
    CAPTURED_PAIRS,
    CUT,
    DRAFTS,
    OF_PAIRS,
    SHORT,
    Expected,
    begun,
    beside_a_kill,
    order,
    said,
)
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_replicas import order as order_with
from tests.e2e.workload import answers, answers_together

MODEL, MIXTURE = GOLDEN / "qwen3", GOLDEN / "qwen3_moe"


def maps_of(engine: EngineProcess, name: str) -> str:
    return Path(f"/proc/{engine.actors()[name]['pid']}/maps").read_text()


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Each request alone, op by op, without drafts."""
    with engine_on_card(MODEL, "--plan", "eager") as engine:
        assert "libcuda.so.1" in maps_of(engine, "worker0")
        assert "paddle" not in maps_of(engine, "worker0")
        return said(answers(engine, BODIES, concurrency=1))


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_on_card(MODEL, *CAPTURED, *CUT, *DRAFTS) as engine:
        yield engine


def test_answers_do_not_depend_on_the_batch(engine: EngineProcess, expected: Expected) -> None:
    assert said(answers_together(engine, BODIES)) == expected
    assert said(answers(engine, BODIES[::-1], concurrency=3)[::-1]) == expected
    for name in ("num_preemptions_total", "prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total"):
        assert engine.metric(name) > 0, name
    assert engine.metric("captured_step_rows_count") > 0
    assert engine.metric("uncaptured_step_sizes") == 0


@pytest.mark.parametrize("victim", ["worker0", "scheduler"])
def test_streams_continue_after_a_kill(engine: EngineProcess, expected: Expected, victim: str) -> None:
    found = said(asyncio.run(beside_a_kill(engine, SHORT, len(SHORT), victim, restarted=(victim,))))
    assert found == begun(expected)


def test_answers_are_the_same_after_sleep_and_reload(engine: EngineProcess, expected: Expected) -> None:
    for path in ("sleep", "wake", "reload"):
        order(engine, path)
    assert said(answers(engine, SHORT)) == begun(expected)


def test_adapters_have_the_same_answers(expected: Expected, tmp_path: Path) -> None:
    """Together and beside a kill as alone, and the model itself as without adapters."""
    modules = [f"a{seed}={write_adapter(tmp_path / str(seed), MODEL, seed=seed, rank=4 + 3 * seed)}" for seed in range(2)]
    lora = ("--served-model-name", "base", "--enable-lora", "--max-loras", "2", "--lora-modules", *modules)
    bodies = SHORT[:3]
    with engine_on_card(MODEL, *CAPTURED_PAIRS, "--num-kv-blocks", "60", *lora) as engine:
        named = {name: [body | {"model": name} for body in bodies] for name in ("base", "a0", "a1")}
        alone = {name: said(answers(engine, named[name], concurrency=1)) for name in ("a0", "a1")} | {
            "base": begun(expected)[:3]
        }
        assert alone["base"] != alone["a0"] != alone["a1"] != alone["base"]
        mixed = [named[name][index] for index in range(3) for name in named]
        mixed_alone = [alone[name][index] for index in range(3) for name in named]
        assert said(answers_together(engine, mixed)) == mixed_alone
        assert said(asyncio.run(beside_a_kill(engine, mixed, 9, "worker0", restarted=("worker0",)))) == mixed_alone


def test_two_ranks_have_the_same_answers(expected: Expected) -> None:
    with engine_on_card(MODEL, *CAPTURED_PAIRS, *OF_PAIRS) as engine:
        assert said(answers_together(engine, SHORT)) == begun(expected)
        found = said(asyncio.run(beside_a_kill(engine, SHORT, len(SHORT), "worker1", restarted=("worker1",))))
        assert found == begun(expected)


def test_replicas_that_share_experts_have_the_same_answers() -> None:
    """Rows are counted, experts move by command, and one replica goes on while the other is dead."""
    with engine_on_card(MIXTURE, "--plan", "eager") as engine:
        alone = said(answers(engine, SHORT, concurrency=1))
    sharing = ("-dp", "2", "--enable-expert-parallel", "--enable-eplb", "--num-kv-blocks", "60")
    with engine_on_card(MIXTURE, *CAPTURED_PAIRS, *sharing) as engine:
        assert "libcuda.so.1" in maps_of(engine, "worker1")
        assert said(answers_together(engine, SHORT)) == alone
        moved = order_with(engine, "eplb/rebalance", force=True)
        assert (moved.status_code, moved.json()["num_moved"] > 0) == (200, True), moved.text
        assert said(asyncio.run(beside_a_kill(engine, SHORT, len(SHORT), "worker1", restarted=("worker1",)))) == alone
        assert engine.metric("captured_step_rows_count") > 0
        assert engine.actors()["worker0"]["epoch"] == 1
