"""Vision models are published under two sets of names for the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_safetensors
from workers.models import declare_model
from workers.weights.reader import Checkpoint
from workers.weights.safetensors import SafetensorsFile

NEWER = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."}


def checkpoint_of(path: Path) -> Checkpoint:
    config = ModelConfig.read(path)
    return Checkpoint(path, config, declare_model(config)[1])


def stored(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path / "model.safetensors")
    return {name: np.array(tensor.read()) for name, tensor in file.tensors.items()}


def with_other_names(source: Path, target: Path) -> None:
    """Write the checkpoint with the older names turned into the newer, or the other way."""
    tensors = {}
    is_newer = any(name.startswith("model.language_model.") for name in stored(source))
    for name, tensor in stored(source).items():
        pairs = {new: old for old, new in NEWER.items()} if is_newer else NEWER
        prefix = next(prefix for prefix in pairs if name.startswith(prefix))
        tensors[pairs[prefix] + name.removeprefix(prefix)] = tensor
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    write_safetensors(target / "model.safetensors", tensors, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_both_names_are_read(name: str, tmp_path: Path) -> None:
    with_other_names(GOLDEN / name, tmp_path / "other")
    here, there = checkpoint_of(GOLDEN / name), checkpoint_of(tmp_path / "other")
    weights = declare_model(ModelConfig.read(GOLDEN / name))[1]
    for tensor in weights.shapes():
        assert np.array_equal(here.read(tensor), there.read(tensor))


def test_unknown_encoder_tensor_is_reported(tmp_path: Path) -> None:
    with_other_names(GOLDEN / "qwen3_vl", tmp_path / "other")
    tensors = stored(tmp_path / "other") | {"audio.weight": np.zeros(3, np.float32)}
    write_safetensors(tmp_path / "other" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"audio\.weight \[3\] is unexpected"):
        checkpoint_of(tmp_path / "other")
