"""Weights that one replica cannot load again: replicas that share experts with it continue without it, and a command repairs
it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.messages import WeightsState
from tests.e2e.checkpoints import other_weights
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_replicas import ask, gauges, order
from tests.e2e.workload import Answer, answers_together, mixed_bodies
from tests.waiting import wait_until

OPTIONS = ("--dtype", "float32", "--max-model-len", "1000", "--restart-limit", "100", "--threads", "1")
SHARED = (*OPTIONS, "--data-parallel-size", "2", "--enable-expert-parallel")
BODIES = mixed_bodies(8, seed=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(GOLDEN / "qwen3_moe", tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def engine(model: Path, packed: Path) -> Iterator[EngineProcess]:
    with EngineProcess(model, *SHARED, "--weight-cache-dir", str(packed)) as running:
        yield running


@pytest.fixture(scope="module")
def truth(engine: EngineProcess) -> list[Answer]:
    return unversioned(answers_together(engine, BODIES))


def unversioned(found: list[Answer]) -> list[Answer]:
    return [replace(answer, weight_version="") for answer in found]


def lose_weights(engine: EngineProcess, model: Path, packed: Path, victim: str, others: Path | None = None) -> None:
    """Remove the weights from the disk before `victim` loads them again, or put `others` in their place."""
    epoch = int(engine.actors()[victim]["epoch"])
    shutil.rmtree(packed)
    (model / "model.safetensors").unlink()
    if others is not None:
        shutil.copy(others / "model.safetensors", model)
    engine.kill(victim)
    state = [WeightsState.NORMAL] * 2
    state[int(victim[-1])] = WeightsState.CLEARED
    wait_until(lambda: gauges(engine, "engine_state") == state, what=f"{victim} has none")
    assert int(engine.actors()[victim]["epoch"]) == epoch + 1


@pytest.mark.parametrize("victim", ["worker1", "worker0"])
def test_replica_without_weights_comes_back_by_command(
    engine: EngineProcess, truth: list[Answer], model: Path, packed: Path, victim: str, tmp_path: Path
) -> None:
    """The other replica gets all requests and computes all experts; no process is restarted for that."""
    others = other_weights(GOLDEN / "qwen3_moe", tmp_path / "others") if victim == "worker0" else None
    lose_weights(engine, model, packed, victim, others)
    epochs = {name: actor["epoch"] for name, actor in engine.actors().items()}
    assert unversioned(answers_together(engine, BODIES)) == truth
    refused = order(engine, "wake")
    assert (refused.status_code, "model" in refused.text) == (400, True), refused.text
    assert unversioned(answers_together(engine, BODIES)) == truth
    shutil.copy(GOLDEN / "qwen3_moe" / "model.safetensors", model)
    assert order(engine, "wake").status_code == 200
    assert gauges(engine, "engine_state") == [WeightsState.NORMAL] * 2
    for replica in ("0", "1"):
        ask(engine, {"prompt": [1, 2, 3], "max_tokens": 2}, replica=replica).raise_for_status()
    assert unversioned(answers_together(engine, BODIES)) == truth
    assert {name: actor["epoch"] for name, actor in engine.actors().items()} == epochs


@pytest.mark.parametrize("victim", ["worker1", "worker0"])
def test_other_weights_heal_it_too(engine: EngineProcess, truth: list[Answer], model: Path, packed: Path, victim: str) -> None:
    """The replica that has weights is paused for it."""
    lose_weights(engine, model, packed, victim)
    version = max(gauges(engine, "engine_weight_version"))
    for path, body in (("pause", {}), ("reload", {"path": str(GOLDEN / "qwen3_moe")}), ("resume", {})):
        answer = order(engine, path, **body)
        assert answer.status_code == 200, (path, answer.text)
    assert gauges(engine, "engine_state") == [WeightsState.NORMAL] * 2
    assert gauges(engine, "engine_weight_version") == [version + 1] * 2
    assert unversioned(answers_together(engine, BODIES)) == truth
    shutil.copy(GOLDEN / "qwen3_moe" / "model.safetensors", model)
    assert order(engine, "pause").status_code == 200
    assert order(engine, "reload", path=str(model)).status_code == 200
    assert order(engine, "resume").status_code == 200
