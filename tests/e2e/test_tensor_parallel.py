"""Two ranks that share a model answer like one, and a rank that dies or hangs costs no stream a byte."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from shm.segment import segment_names
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.precisions import PRECISIONS
from tests.e2e.workload import Answer, answers, answers_together, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S
from tools.ctl import main as ctl

MODEL = GOLDEN / "qwen3"
OPTIONS = ("--max-model-len", "1000", "--restart-limit", "100")
TWO_RANKS = (*OPTIONS, "--tensor-parallel-size", "2", "--threads", "1", "--hang-timeout", "6")
BODIES = mixed_bodies(16, seed=20)
LONG_BODIES = mixed_bodies(8, seed=5, max_tokens=120, max_prompt=150)
for body in (*BODIES[1::4], *LONG_BODIES[1::4]):  # each rank has the masks of all rows
    body["guided_regex"] = "([a-z]+ [0-9]{2,3}[.] ){300,}"


@pytest.fixture(scope="module")
def alone() -> tuple[list[Answer], list[Answer]]:
    """Return the answers of a single rank."""
    with EngineProcess(MODEL, *OPTIONS) as engine:
        return answers(engine, BODIES), answers(engine, LONG_BODIES)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(MODEL, *TWO_RANKS) as engine:
        yield engine


def test_the_same_bytes(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]]) -> None:
    """All together, and again with a warm prefix cache; both ranks took part."""
    assert answers_together(engine, BODIES) == alone[0]
    assert answers(engine, BODIES[::-1], concurrency=7)[::-1] == alone[0]
    assert engine.metric("prefix_cache_hits_total") > 0
    for rank in ("worker0", "worker1"):
        assert engine.metric("worker_tokens_total", actor=rank) > 0


@pytest.mark.parametrize("victims", [["worker1"], ["worker0"], ["worker0", "worker1"], ["worker1", "scheduler"]], ids=str)
def test_killed_rank_costs_no_byte(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]], victims: list[str]) -> None:
    """Ranks die in the middle of steps. Only those that were killed are restarted."""
    end_in_turn(engine, alone[1], victims, signal.SIGKILL)


def test_a_rank_that_hangs_is_replaced_alone(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]]) -> None:
    before = engine.metric("actor_hangs_total")
    end_in_turn(engine, alone[1], ["worker1"], signal.SIGSTOP)
    assert engine.metric("actor_hangs_total") == before + 1


def test_rank_groups_are_shown(engine: EngineProcess, capsys: pytest.CaptureFixture[str]) -> None:
    answers(engine, BODIES[:1])  # ranks that ran a step are in the same epoch
    assert ctl(["--run", engine.run.run_id, "rank-groups", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)
    assert [(rank["actor"], rank["replica"], rank["rank"]) for rank in ranks] == [("worker0", 0, 0), ("worker1", 0, 1)]
    answer = httpx.get(f"{engine.url}/admin/rank-groups", timeout=WATCHDOG_S, headers=OPERATOR)
    assert [rank["actor"] for rank in answer.json()["ranks"]] == ["worker0", "worker1"]
    assert [rank["rank_group_epoch"] for rank in answer.json()["ranks"]] == [ranks[0]["rank_group_epoch"]] * 2
    assert ranks[0]["rank_group_epoch"] == ranks[1]["rank_group_epoch"] > 0
    assert all(rank["collectives_total"] > 0 for rank in ranks)


def test_commands_about_experts_are_refused(engine: EngineProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands to show or move experts are refused; the answer names the missing option."""
    assert ctl(["--run", engine.run.run_id, "experts"]) == 1
    assert "--enable-expert-parallel" in capsys.readouterr().err
    assert not [name for name in segment_names(engine.run.run_id) if ".experts." in name]
    for method, path, option in (("GET", "eplb", "--enable-expert-parallel"), ("POST", "eplb/rebalance", "--enable-eplb")):
        answer = httpx.request(method, f"{engine.url}/admin/{path}", timeout=WATCHDOG_S, headers=OPERATOR)
        assert (answer.status_code, option in answer.text) == (409, True), answer.text


def end_in_turn(engine: EngineProcess, expected: list[Answer], victims: list[str], signal_number: int) -> None:
    before = {name: int(row["epoch"]) for name, row in engine.actors().items()}

    async def disturbed() -> None:
        flowing = asyncio.Event()
        streams = asyncio.create_task(stream_all(engine.url, LONG_BODIES, 8, flowing.set))
        await asyncio.wait_for(flowing.wait(), timeout=WATCHDOG_S)
        for victim in victims:
            await asyncio.to_thread(engine.kill, victim, signal_number)
        for victim in victims:
            await asyncio.to_thread(engine.wait_for_restart, victim, before[victim])
        assert await streams == expected

    asyncio.run(disturbed())
    after = {name: int(row["epoch"]) for name, row in engine.actors().items()}
    assert after == {name: epoch + (name in victims) for name, epoch in before.items()}


def test_ranks_share_weights_without_a_cache() -> None:
    """The other precisions are in `tests/workers/rank_group/test_tensor_parallel.py`."""
    options = (*PRECISIONS["int4"], "--max-model-len", "400", "--max-num-batched-tokens", "64")
    with EngineProcess(MODEL, *options) as one:
        expected = answers(one, BODIES)
    with EngineProcess(MODEL, *options, "-tp", "2", "--threads", "1", "--no-weight-cache") as two:
        assert answers(two, BODIES) == expected
        directory = two.run.directory
        assert len(list(directory.glob("packed/*.weights"))) == 1
    assert not directory.exists()


def test_reload_changes_all_ranks_or_none(
    engine: EngineProcess, alone: tuple[list[Answer], list[Answer]], tmp_path: Path
) -> None:
    def reload(**body: object) -> int:
        return httpx.post(f"{engine.url}/admin/reload", json=body, timeout=WATCHDOG_S, headers=OPERATOR).status_code

    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    version = engine.metric("engine_weight_version")
    assert reload(path=str(tmp_path)) == 400  # no weights
    assert reload(ranks=[1]) == 400  # the other rank would go on with others
    assert engine.metric("engine_weight_version") == version
    assert answers(engine, BODIES[:4]) == [replace(answer, weight_version=f"{version:.0f}") for answer in alone[0][:4]]
    assert reload() == 200
    found = answers(engine, BODIES[:4])
    assert {answer.weight_version for answer in found} == {f"{engine.metric('weight_version'):.0f}"} != {f"{version:.0f}"}
    assert [answer.token_logprobs for answer in found] == [answer.token_logprobs for answer in alone[0][:4]]
