"""Replicas that share experts answer as one rank does, an idle one serves the others, and a death costs no stream a byte."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.process.run_directory import root_lock, runs_root
from engine.supervisor.reaper import reap
from shm._native import load_u64
from shm.experts import PROPOSED, ExpertTable
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.test_replicas import ask, order
from tests.e2e.test_tensor_parallel import LONG_BODIES, end_in_turn
from tests.e2e.workload import Answer, answers, answers_together, mixed_bodies
from tests.engine.echo_engine import is_clean, is_gone
from tests.waiting import WATCHDOG_S, wait_until
from tools.ctl import main as ctl
from tools.top.command import main as top

MODEL = GOLDEN / "qwen3_moe"
OPTIONS = ("--dtype", "float32", "--max-model-len", "1000", "--restart-limit", "100")
SHARED = (*OPTIONS, "--enable-expert-parallel", "--threads", "1")
BODIES = mixed_bodies(16, seed=20)
RANKS = ("worker0", "worker1")
BY_ORDER = '{"step_interval": 1000000000, "window_size": 1000000000, "statistics_interval_s": 1000000000}'  # experts move


@pytest.fixture(scope="module")
def alone() -> tuple[list[Answer], list[Answer]]:
    """Return the answers of a single rank."""
    with EngineProcess(MODEL, *OPTIONS) as engine:
        return answers(engine, BODIES), answers(engine, LONG_BODIES)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(MODEL, *SHARED, "--data-parallel-size", "2", "--enable-eplb", "--eplb-config", BY_ORDER) as engine:
        yield engine


def test_the_same_bytes(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]]) -> None:
    """All together, and again with a warm prefix cache; each replica had rows."""
    assert answers_together(engine, BODIES) == alone[0]
    assert answers(engine, BODIES[::-1], concurrency=7)[::-1] == alone[0]
    for rank in RANKS:
        assert engine.metric("worker_tokens_total", actor=rank) > 0


def test_idle_rank_serves_the_other(engine: EngineProcess) -> None:
    """Each runs every step of the rank group; the replica without requests has no rows in any."""

    def have_counted() -> bool:
        """Return whether all steps are counted, also by a rank that got its peer's answer before it began."""
        engine.wait_until_idle()
        return engine.metric("rank_group_steps_total", actor="worker0") == engine.metric(
            "rank_group_steps_total", actor="worker1"
        )

    wait_until(have_counted, what="both ranks have counted their steps")
    before = {rank: engine.metric("empty_rank_group_steps_total", actor=rank) for rank in RANKS}
    ask(engine, {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}, replica="1").raise_for_status()
    wait_until(have_counted, what="both ranks have counted their steps")
    assert engine.metric("empty_rank_group_steps_total", actor="worker0") >= before["worker0"] + 20
    assert engine.metric("empty_rank_group_steps_total", actor="worker1") == before["worker1"]
    for rank in RANKS:  # a rank without rows takes part too
        assert engine.metric("collectives_total", actor=rank) > 0


@pytest.mark.parametrize("victims", [["worker1"], ["worker0", "scheduler1"], ["scheduler0", "worker0"]], ids=str)
def test_dead_actor_costs_no_byte(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]], victims: list[str]) -> None:
    end_in_turn(engine, alone[1], victims, signal.SIGKILL)


def test_experts_are_shown_and_moved_by_command(
    engine: EngineProcess, alone: tuple[list[Answer], list[Answer]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts are moved while no rank has rows; at the first command the leading rank dies in the middle."""
    assert answers_together(engine, BODIES) == alone[0]
    engine.wait_until_idle()
    before = experts_of(engine, capsys)
    assert (before["placement_version"], [layer["layer"] for layer in before["layers"]]) == (0, [0, 1, 2])
    for layer in before["layers"]:
        assert sum(layer["rank_rows"]) == pytest.approx(layer["num_rows"])
        assert layer["imbalance"] == pytest.approx(2 * max(layer["rank_rows"]) / layer["num_rows"])
        assert layer["hottest"][0]["rows"] > layer["hottest"][-1]["rows"] > 0
    for layer, recent in zip(before["layers"], before["recent_layers"], strict=True):  # a look back of many years
        assert 0 < recent["num_rows"] <= layer["num_rows"]
    died = order_with_death(engine, leader_dies=True)
    assert (died.status_code, "the rebalancing was interrupted: worker0 died" in died.text) == (503, True)
    who_leads_now = {"recent_layers": before["recent_layers"]}  # looks back at what was counted since
    assert experts_of(engine, capsys) | who_leads_now == before

    moved = order(engine, "eplb/rebalance", force=True)
    assert (moved.status_code, moved.json()["num_moved"] > 0, moved.json()["placement_version"]) == (200, True, 1), moved.text
    after = experts_of(engine, capsys)
    assert (after["placement_version"], after["num_rebalances"]) == (1, 1)
    ratios = [[layer["imbalance"] for layer in view["layers"]] for view in (before, after)]
    assert sum(ratios[1]) / len(ratios[1]) == pytest.approx(moved.json()["imbalance"])
    assert sum(ratios[1]) < sum(ratios[0])
    assert [layer["num_rows"] for layer in after["layers"]] == [layer["num_rows"] for layer in before["layers"]]
    assert top(["--run", engine.run.run_id, "--json", "--interval", "0.05"]) == 0
    derived = json.loads(capsys.readouterr().out)["derived"]
    assert [(rank_group["ranks"], rank_group["num_members"]) for rank_group in derived["rank_groups"]] == [(list(RANKS), 2)]
    assert 0 < derived["rank_groups"][0]["collective_share"] < 1
    assert (derived["experts"]["placement_version"], derived["experts"]["num_rebalances"]) == (1, 1)
    assert ctl(["--run", engine.run.run_id, "rebalance"]) == 0
    assert "no experts moved" in capsys.readouterr().out
    assert answers_together(engine, BODIES) == alone[0]


def experts_of(engine: EngineProcess, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the experts, which the shell and HTTP must report alike, once no restarted rank resets its recent window in
    between."""
    views: list[dict[str, Any]] = []

    def are_alike() -> bool:
        assert ctl(["--run", engine.run.run_id, "experts", "--json"]) == 0
        view: dict[str, Any] = json.loads(capsys.readouterr().out)
        answer = httpx.get(f"{engine.url}/admin/eplb", timeout=WATCHDOG_S, headers=OPERATOR).json()
        views.append(view)
        return answer["recent_s"] >= view.pop("recent_s") >= 0 and answer == {
            "message": answer["message"],
            "recent_s": answer["recent_s"],
            **view,
        }

    wait_until(are_alike, what="one view of the experts")
    return views[-1]


def order_with_death(engine: EngineProcess, *, leader_dies: bool) -> httpx.Response:
    """Return the answer to a command while one of two ranks dies after both proposed a placement and before they switched."""
    table, epochs = ExpertTable.attach(engine.run.run_id, is_readonly=True), {rank: engine.actors()[rank] for rank in RANKS}
    proposed = load_u64(table.words, PROPOSED)
    engine.kill("worker1", signal.SIGSTOP)  # it does not get ready
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(order, engine, "eplb/rebalance", force=True)
        wait_until(lambda: load_u64(table.words, PROPOSED) != proposed, what="a placement is proposed")
        victim = RANKS[not leader_dies]
        engine.kill(victim)
        response = answer.result() if leader_dies else None
        if leader_dies:
            engine.kill("worker1", signal.SIGCONT)
        engine.wait_for_restart(victim, int(epochs[victim]["epoch"]))
        return response or answer.result()


def test_ranks_of_one_replica(alone: tuple[list[Answer], list[Answer]]) -> None:
    """Experts move by command even if a rank that does not lead dies meanwhile."""
    options = ("--tensor-parallel-size", "2", "--expert-placement-strategy", "round_robin", "--enable-eplb")
    with EngineProcess(MODEL, *SHARED, *options, "--eplb-config", BY_ORDER) as engine:
        assert answers_together(engine, BODIES) == alone[0]
        moved = order_with_death(engine, leader_dies=False)
        assert (moved.status_code, moved.json()["num_moved"] > 0) == (200, True), moved.text
        end_in_turn(engine, alone[1], ["worker0"], signal.SIGKILL)


def test_weights_change_while_all_replicas_are_at_rest(engine: EngineProcess, alone: tuple[list[Answer], list[Answer]]) -> None:
    """A running replica would have rows computed by ranks that already hold other weights."""
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
    assert order(engine, "eplb/rebalance", force=True).status_code == 409  # no rank could run the steps
    assert order(engine, "wake").status_code == 200
    assert [answer.text for answer in answers_together(engine, BODIES)] == [answer.text for answer in alone[0]]


def test_experts_move_under_streams(alone: tuple[list[Answer], list[Answer]], capsys: pytest.CaptureFixture[str]) -> None:
    """Experts move all the time, by recent load, some with two copies; the leading rank dies meanwhile, then all at once. Their
    placement can be read after the death of the engine."""
    config = {"num_redundant_experts": 3, "window_size": 60, "step_interval": 5, "check_interval_s": 0.02, "min_gain": 0}
    options = ("--data-parallel-size", "2", "--enable-eplb", "--eplb-config", json.dumps(config))
    with EngineProcess(MODEL, *SHARED, *options) as engine:
        assert answers_together(engine, BODIES) == alone[0]
        for victims in (["worker0"], ["worker1"], list(RANKS)):
            end_in_turn(engine, alone[1], victims, signal.SIGKILL)

        def have_moved_often() -> bool:
            """Return whether experts have moved often; they are balanced now and then, while there are steps."""
            assert answers_together(engine, BODIES) == alone[0]
            return engine.metric("eplb_rebalances_total") > 10

        wait_until(have_moved_often, what="experts have moved more than ten times")
        assert engine.metric("eplb_moved_experts_total") > engine.metric("eplb_rebalances_total")
        run, pids = engine.run, [int(actor["pid"]) for actor in engine.actors().values()]
        engine.close()
        assert ctl(["--run-dir", str(run.directory), "experts"]) == 0
        assert "rebalances; rebalancing is on" in capsys.readouterr().out
    wait_until(lambda: all(map(is_gone, pids)), what="its processes end with it")
    with root_lock(runs_root()):
        reap(runs_root())
    assert is_clean(run)
