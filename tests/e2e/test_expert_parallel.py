"""Replicas that share experts answer as one rank does, an idle one serves the others, and a death costs no stream a byte."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_replicas import ask, order
from tests.e2e.test_tensor_parallel import end_in_turn
from tests.e2e.workload import Answer, answers, answers_together, mixed_bodies

MODEL = GOLDEN / "qwen3_moe"
OPTIONS = ("--dtype", "float32", "--max-model-len", "1000", "--restart-limit", "100")
SHARED = (*OPTIONS, "--enable-expert-parallel", "--threads", "1")
BODIES = mixed_bodies(16, seed=20)
LONG_BODIES = mixed_bodies(8, seed=5, max_tokens=600, max_prompt=150)
RANKS = ("worker0", "worker1")


@pytest.fixture(scope="module")
def alone() -> tuple[list[Answer], list[Answer]]:
    """What one rank answers."""
    with EngineProcess(MODEL, *OPTIONS) as engine:
        return answers(engine, BODIES), answers(engine, LONG_BODIES)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(MODEL, *SHARED, "--data-parallel-size", "2") as engine:
        yield engine


def test_the_same_bytes(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]]) -> None:
    """Together, and a second time with a warm prefix cache; each replica had rows."""
    assert answers_together(engine, BODIES) == alone[0]
    assert answers(engine, BODIES[::-1], concurrency=7)[::-1] == alone[0]
    for rank in RANKS:
        assert engine.metric("worker_tokens_total", actor=rank) > 0


def test_an_idle_rank_serves_the_other(engine: EngineProcess) -> None:
    """Each runs every step of the gang; the replica without requests has no rows in any."""
    before = {rank: engine.metric("empty_gang_steps_total", actor=rank) for rank in RANKS}
    ask(engine, {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}, replica="1").raise_for_status()
    assert engine.metric("empty_gang_steps_total", actor="worker0") >= before["worker0"] + 20
    assert engine.metric("empty_gang_steps_total", actor="worker1") == before["worker1"]
    for rank in RANKS:  # who has no rows meets the others all the same
        assert engine.metric("collectives_total", actor=rank) > 0


@pytest.mark.parametrize("victims", [["worker1"], ["worker0", "scheduler1"], ["scheduler0", "worker0"]], ids=str)
def test_who_dies_costs_no_byte(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]], victims: list[str]) -> None:
    end_in_turn(engine, alone[1], victims, signal.SIGKILL)


def test_ranks_of_one_replica(alone: tuple[list[Answer], list[Answer]]) -> None:
    with EngineProcess(MODEL, *SHARED, "--tensor-parallel-size", "2", "--expert-placement-strategy", "round_robin") as engine:
        assert answers_together(engine, BODIES) == alone[0]
        end_in_turn(engine, alone[1], ["worker0"], signal.SIGKILL)


def test_weights_change_while_all_replicas_are_at_rest(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]]) -> None:
    """One that runs would have rows computed by ranks that hold other weights already."""
    refused = order(engine, "reload")
    assert (refused.status_code, "pause the engine first" in refused.text) == (409, True)
    assert order(engine, "reload", ranks=[0]).status_code == 400
    for path in ("pause", "reload", "resume"):
        assert order(engine, path).status_code == 200, path
    assert {answer.weight_version for answer in answers(engine, BODIES[:4])} == {"2"}
    for path in ("pause", "sleep"):
        assert order(engine, path).status_code == 200, path
    maps = [Path(f"/proc/{engine.actors()[rank]['pid']}/maps").read_text() for rank in RANKS]
    assert not any(".weights" in text for text in maps), "weights are still mapped"
    assert order(engine, "wake").status_code == 200
    assert [answer.text for answer in answers_together(engine, BODIES)] == [answer.text for answer in alone[0]]


def test_experts_move_under_streams(alone: tuple[list[Answer], list[Answer]]) -> None:
    """All the time, by what was asked for last, some twice there; who leads that dies in the middle of it, then all at once."""
    config = {"num_redundant_experts": 3, "window_size": 60, "step_interval": 5, "check_interval_s": 0.02, "min_gain": 0}
    options = ("--data-parallel-size", "2", "--enable-eplb", "--eplb-config", json.dumps(config))
    with EngineProcess(MODEL, *SHARED, *options) as engine:
        assert answers_together(engine, BODIES) == alone[0]
        for victims in (["worker0"], ["worker1"], list(RANKS)):
            end_in_turn(engine, alone[1], victims, signal.SIGKILL)
        assert engine.metric("eplb_moved_experts_total") > engine.metric("eplb_rebalances_total") > 10
