"""Checkpoints that a test derives from a golden one: other weights, or broken ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def other_weights(source: Path, target: Path, seed: int = 1) -> Path:
    """Write a checkpoint of the same shape as `source` with other weights (scaled by noise) to `target`."""
    shutil.copytree(source, target)
    rng = np.random.default_rng(seed)
    tensors = load_file(source / "model.safetensors")
    noisy = {name: (value * rng.normal(1.0, 0.3, value.shape)).astype(value.dtype) for name, value in tensors.items()}
    save_file(noisy, target / "model.safetensors", metadata={"format": "pt"})
    return target


def broken_missing(source: Path, target: Path) -> Path:
    """Write a checkpoint that lacks one tensor and has another of a wrong shape."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def broken_truncated(source: Path, target: Path) -> Path:
    """Write a checkpoint with a truncated file."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50_000])
    return target


def broken_shape(source: Path, target: Path) -> Path:
    """Write a checkpoint of another model: its config has another hidden size."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    config["hidden_size"] *= 2
    (target / "config.json").write_text(json.dumps(config))
    return target


def longer(source: Path, target: Path, max_positions: int) -> Path:
    """Write a checkpoint that takes longer prompts than its model was made for."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = max_positions
    (target / "config.json").write_text(json.dumps(config))
    return target
