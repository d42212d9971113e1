"""Statistics of activations: read and refused, and the weights rounded by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from ops.cpu.executors import Immediate
from ops.cpu.table import make_table
from ops.modules import Linear
from ops.table import OpTable
from shm.blake2 import blake2b
from tests.workers.checkpoints import TINY, write_checkpoint
from workers.models import declare_model
from workers.models.loading import LoadedModel, load_model
from workers.weights.cache import WeightCache
from workers.weights.calibration import Calibration, calibrated, name_of, write_calibration
from workers.weights.declaration import Weights
from workers.weights.loader import LoadOptions
from workers.weights.precision import Precision

MIXED = {
    **TINY,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
}
PRECISION = Precision("float32", "wint4")
NATIVE = make_table(Immediate())


def statistics(weights: Weights, seed: int = 0) -> dict[str, np.ndarray]:
    """Return mean squares as a text leaves them: some inputs are much larger than others."""
    generator = np.random.default_rng(seed)
    return {name_of(linear): generator.lognormal(0, 2, linear.num_inputs).astype(np.float32) for linear in calibrated(weights)}


def written(path: Path, squares: dict[str, np.ndarray]) -> Calibration:
    write_calibration(path, squares, {})
    return Calibration(path, blake2b(path.read_bytes(), digest_size=16).hexdigest())


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, ModelConfig, Weights]:
    path = tmp_path / "model"
    path.mkdir()
    config = write_checkpoint(path, MIXED)
    return path, config, declare_model(config)[1]


def load(path: Path, ops: OpTable = NATIVE, **options: Any) -> LoadedModel:
    return load_model(
        path, ModelConfig.read(path), ops, 16, lambda done, total: None, LoadOptions(precision=PRECISION, **options)
    )


def packed(loaded: LoadedModel) -> list[bytes]:
    found: list[Any] = [linear.weight for linear in loaded.linears if linear.name != "lm_head"]
    found += [part for mixture in loaded.mixtures for part in (mixture.weight.gate_up, mixture.weight.down)]
    return [weight.values.numpy().tobytes() + weight.scales.numpy().tobytes() for weight in found]


def test_every_linear_is_rounded_by_its_statistics(checkpoint: tuple[Path, ModelConfig, Weights], tmp_path: Path) -> None:
    """Each of several experts has its own."""
    path, _, weights = checkpoint
    squares = statistics(weights)
    plain, better = load(path), load(path, calibration=written(tmp_path / "a.safetensors", squares))
    assert all(changed != rounded for changed, rounded in zip(packed(better), packed(plain), strict=True))


def test_a_wrong_file_is_refused(checkpoint: tuple[Path, ModelConfig, Weights], tmp_path: Path) -> None:
    path, _, weights = checkpoint
    squares, file = statistics(weights), tmp_path / "c.safetensors"
    name = "model.layers.1.self_attn.q_proj"
    for changed, text in (
        ({key: value for key, value in squares.items() if key != name}, f"{name} is missing"),
        (squares | {"model.layers.9.mlp.down_proj": np.ones(3)}, "model.layers.9.mlp.down_proj is unknown"),
        (squares | {name: np.ones(63)}, rf"{name} has shape \[63\], expected \[64\]"),
        (squares | {name: np.full(64, np.nan)}, f"{name} has values that are negative, NaN or infinite"),
        (squares | {name: np.full(64, -1.0)}, f"{name} has values that are negative, NaN or infinite"),
    ):
        with pytest.raises(CheckpointError, match=text):
            load(path, calibration=written(file, changed))
    calibration = written(file, squares)
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match="changed since the engine started; restore it, or restart the engine"):
        load(path, calibration=calibration)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        load(path, calibration=calibration)
    with pytest.raises(CheckpointError, match="has the format 'pt', expected 'tokamak-calibration-1'"):
        load(path, calibration=Calibration(path / "model.safetensors", ""))


def test_packed_weights_outlive_the_file(checkpoint: tuple[Path, ModelConfig, Weights], tmp_path: Path) -> None:
    """A restarted worker maps what was packed with the same statistics; others, or none, are packed again."""
    path, _, weights = checkpoint
    cache = WeightCache(tmp_path / "cache", 1 << 30)
    calibration = written(tmp_path / "d.safetensors", statistics(weights))
    first = load(path, calibration=calibration, cache=cache)
    calibration.path.unlink()
    again = load(path, calibration=calibration, cache=cache)
    assert (first.cache, again.cache) == ("miss", "hit")
    assert packed(again) == packed(first)
    others = written(calibration.path, statistics(weights, seed=1))
    assert [load(path, calibration=each, cache=cache).cache for each in (others, None)] == ["miss", "miss"]


def test_unused_inputs_still_count(tmp_path: Path) -> None:
    linear = Linear(("a",), 64, (32,))
    weights = Weights()
    weights.linears.append(linear)
    squares = np.zeros(64, np.float32)
    squares[5] = 2
    written(tmp_path / "e.safetensors", {"a": squares}).apply(weights, ModelConfig.read(write_tiny(tmp_path)))
    assert linear.importances is not None
    assert (linear.importances > 0).all()
    assert linear.importances.mean() == pytest.approx(1)


def write_tiny(directory: Path) -> Path:
    write_checkpoint(directory, TINY)
    return directory
