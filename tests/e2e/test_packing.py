"""A rank dies while it packs weights for all ranks: another one packs instead, and the engine serves either the old or the new
weights. They are rounded by statistics, which give the same bytes on one rank and on two.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from tests.e2e.checkpoints import other_weights
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_replicas import order
from tests.e2e.workload import answers, mixed_bodies
from tests.waiting import wait_until
from tests.workers.checkpoints import write_checkpoint
from workers.models import declare_model
from workers.weights.calibration import calibrated, name_of, write_calibration

LIMITS = ("--max-model-len", "400", "--restart-limit", "100")
BODIES = mixed_bodies(4, seed=5, max_tokens=24, max_prompt=40)
RANKS = ("worker0", "worker1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one shape, large enough that packing can be interrupted."""
    first = shutil.copytree(GOLDEN / "qwen3", tmp_path_factory.mktemp("weights") / "a")
    config = json.loads((first / "config.json").read_text())
    del config["layer_types"]
    write_checkpoint(first, config | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6})
    return [first, other_weights(first, first.parent / "b")]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def rounding(models: list[Path], packed: Path) -> tuple[str, ...]:
    path, generator = packed / "statistics.safetensors", np.random.default_rng(0)
    linears = calibrated(declare_model(ModelConfig.read(models[0]))[1])
    write_calibration(path, {name_of(linear): generator.lognormal(0, 2, linear.num_inputs) for linear in linears}, {})
    return "--quantization", "wint4", "--quantization-calibration", str(path)


@pytest.fixture(scope="module")
def engine(models: list[Path], packed: Path, rounding: tuple[str, ...]) -> Iterator[EngineProcess]:
    with EngineProcess(
        models[0], *LIMITS, *rounding, "-tp", "2", "--threads", "1", "--weight-cache-dir", str(packed)
    ) as running:
        yield running


def test_packing_rank_dies(engine: EngineProcess, models: list[Path], packed: Path, rounding: tuple[str, ...]) -> None:
    truths = [logprobs(engine)]
    before = set(packed.glob("*.weights"))
    epochs = {rank: int(engine.actors()[rank]["epoch"]) for rank in RANKS}
    with ThreadPoolExecutor(1) as pool:
        victim, answer = killed_while_packing(engine, models, packed, before, pool)
        assert (answer.result().status_code, f"{victim} died while" in answer.result().text) == (503, True)
    engine.wait_for_restart(victim, epochs[victim])
    wait_until(lambda: set(packed.glob("*.weights")) > before, what="the other one has packed them")
    wait_until(lambda: versions(engine) == {engine.metric("engine_weight_version")}, what="the old ones are back")
    wait_until(engine.is_healthy, what="it serves")
    assert logprobs(engine) == truths[0]
    assert int(engine.actors()[RANKS[victim == RANKS[0]]]["epoch"]) == epochs[RANKS[victim == RANKS[0]]]
    num_packed = engine.metric("weight_cache_loads_total", found="miss")
    assert order(engine, "reload", path=str(models[1])).status_code == 200
    assert engine.metric("weight_cache_loads_total", found="miss") == num_packed  # by the rank that took over
    assert not list(packed.glob("*.partial"))
    assert len(list(packed.glob("*.weights"))) == 2
    with EngineProcess(models[1], *LIMITS, *rounding, "--no-weight-cache") as fresh:
        assert logprobs(engine) == logprobs(fresh) != truths[0]


def versions(engine: EngineProcess) -> set[float]:
    return {engine.metric("rank_weight_version", actor=rank) for rank in RANKS}


def logprobs(engine: EngineProcess) -> list[list[float]]:
    return [answer.token_logprobs for answer in answers(engine, BODIES)]


def killed_while_packing(
    engine: EngineProcess, models: list[Path], packed: Path, before: set[Path], pool: ThreadPoolExecutor
) -> tuple[str, Future[httpx.Response]]:
    """Reload other weights and kill the rank that packs them in the middle of it; repeat until the kill comes in time."""
    pids = {int(engine.actors()[rank]["pid"]): rank for rank in RANKS}
    while True:
        answer = pool.submit(order, engine, "reload", path=str(models[1]))
        wait_for_packing(packed, answer)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        holders = {holder_of(partial) for partial in packed.glob("*.partial")}
        packer = next((rank for pid, rank in pids.items() if pid in holders), "")
        for pid, rank in pids.items():
            os.kill(pid, signal.SIGKILL if rank == packer else signal.SIGCONT)
        if packer:
            return packer, answer
        assert answer.result().status_code == 200, answer.result().text
        assert order(engine, "reload", path=str(models[0])).status_code == 200
        for path in set(packed.glob("*.weights")) - before:
            path.unlink()


def wait_for_packing(packed: Path, answer: Future[httpx.Response]) -> None:
    wait_until(lambda: answer.done() or list(packed.glob("*.partial")), what="they are being packed, or were")


def holder_of(path: Path) -> int:
    """Return the process that has an exclusive lock on a file; 0: none, or the file is gone."""
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return 0
    for line in Path("/proc/locks").read_text().splitlines():
        _, kind, _, access, pid, device = line.replace("-> ", "").split()[:6]
        if (kind, access) == ("FLOCK", "WRITE") and int(device.rpartition(":")[2]) == inode and "->" not in line:
            return int(pid)
    return 0
