"""Several ranks in all precisions and layouts, two engines of four ranks each side by side, and failures of them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from engine.messages import WeightsState
from engine.process.run_directory import root_lock, runs_root
from engine.supervisor.reaper import reap
from tests.e2e.engine_process import GOLDEN, EngineProcess, leftovers
from tests.e2e.layouts import check
from tests.e2e.test_replicas import ask, gauges
from tests.e2e.test_tensor_parallel import LONG_BODIES, end_in_turn
from tests.e2e.workload import Answer, answers, mixed_bodies
from tests.engine.echo_engine import is_clean, is_gone
from tests.waiting import wait_until

OPTIONS = ("--dtype", "float32", "--max-model-len", "1000", "--restart-limit", "100")
FOUR_RANKS = (*OPTIONS, "-dp", "2", "-tp", "2", "--enable-expert-parallel", "--threads", "1")
BODIES = mixed_bodies(8, seed=20)


@pytest.mark.parametrize(
    ("model", "precision", "layouts"),
    [
        ("ernie4_5_moe", "bfloat16", ("dp2-ep",)),
        ("deepseek_v3", "int8", ("tp2-ep", "dp2-ep-apart")),
        ("qwen3_moe", "int4", ("dp2-ep-eplb",)),
    ],
)
def test_the_same_bytes(model: str, precision: str, layouts: tuple[str, ...]) -> None:
    check(model, precision, layouts)


@pytest.fixture(scope="module")
def alone() -> tuple[list[Answer], list[Answer]]:
    """Return the answers of a single rank."""
    with EngineProcess(GOLDEN / "qwen3_moe", *OPTIONS) as engine:
        return answers(engine, BODIES), answers(engine, LONG_BODIES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the second engine, separate from that of the first."""
    return shutil.copytree(GOLDEN / "qwen3_moe", tmp_path_factory.mktemp("weights") / "qwen3_moe")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def engines(model: Path, packed: Path) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    first = EngineProcess(GOLDEN / "qwen3_moe", *FOUR_RANKS, "--hang-timeout", "6")
    second = EngineProcess(model, *FOUR_RANKS, "--weight-cache-dir", str(packed))
    with first, second:
        yield first, second


def test_two_engines_answer_at_once(
    engines: tuple[EngineProcess, EngineProcess], alone: tuple[list[Answer], list[Answer]]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda engine: answers(engine, BODIES), engines)) == [alone[0]] * 2


def test_only_the_hanging_rank_is_replaced(
    engines: tuple[EngineProcess, EngineProcess], alone: tuple[list[Answer], list[Answer]]
) -> None:
    """The rank group of four waits for it, and continues when it is replaced."""
    hangs = [engine.metric("actor_hangs_total") for engine in engines]
    end_in_turn(engines[0], alone[1], ["worker3"], signal.SIGSTOP)
    assert [engine.metric("actor_hangs_total") for engine in engines] == [hangs[0] + 1, hangs[1]]


def test_replica_without_a_rank_blocks_no_other(
    engines: tuple[EngineProcess, EngineProcess], alone: tuple[list[Answer], list[Answer]], model: Path, packed: Path
) -> None:
    """The first rank has no weights, and its scheduler is stopped before it can report that. Meanwhile the other replica
    computes its experts."""
    engine = engines[1]
    epoch = int(engine.actors()["worker2"]["epoch"])
    shutil.rmtree(packed)
    (model / "model.safetensors").unlink()
    engine.kill("scheduler1", signal.SIGSTOP)
    engine.kill("worker2")
    wait_until(lambda: engine.actors()["worker2"]["epoch"] > epoch, what="worker2 is there")
    wait_until(lambda: engine.actors()["worker2"]["state"] == "READY", what="worker2 is ready")
    for body, expected in zip(BODIES, alone[0], strict=True):
        answer = ask(engine, body, replica="0").raise_for_status().json()
        assert answer["choices"][0]["token_ids"] == expected.token_ids
    assert engine.metric("rank_weight_version", actor="worker3") == 1
    engine.kill("scheduler1", signal.SIGCONT)
    states = [WeightsState.NORMAL, WeightsState.CLEARED]
    wait_until(lambda: gauges(engine, "engine_state") == states, what="its replica has no weights")
    assert answers(engine, BODIES) == alone[0]


def test_killed_engine_leaves_the_other_alone(
    engines: tuple[EngineProcess, EngineProcess], alone: tuple[list[Answer], list[Answer]]
) -> None:
    """Nothing of the killed one is left, including the memory of its rank group and caches, which ends with the last process
    that has it open."""
    first, second = engines
    before = {name: row["epoch"] for name, row in second.actors().items()}
    pids, run = [int(row["pid"]) for row in first.actors().values()], first.run
    arenas = {link for pid in pids for link in memory_files(pid)}
    assert len(arenas) == 3  # a KV arena of each replica, one comm arena of all
    assert not arenas & {link for row in second.actors().values() for link in memory_files(int(row["pid"]))}
    first.close()
    wait_until(lambda: all(map(is_gone, pids)), what="its processes end with it")
    with root_lock(runs_root()):
        reap(runs_root())
    assert is_clean(run)
    assert leftovers(pids) == []
    assert answers(second, BODIES) == alone[0]
    assert {name: row["epoch"] for name, row in second.actors().items()} == before


def memory_files(pid: int) -> set[int]:
    """Return the arenas that a process has open, by inode; a descriptor closed meanwhile is skipped."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(entry).startswith("/memfd:tokamak-"):
                found.add(entry.stat().st_ino)
    return found
