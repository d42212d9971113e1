"""Experts of a layer that are stored as one tensor, and gate and up as one, are read as matrices of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.workers.checkpoints import drawn_tensors, write_config, write_safetensors
from tests.workers.test_variants import PROCESSOR, SEEING, VARIANTS
from workers.models import declare_model
from workers.weights.reader import Checkpoint


def experts_of(tensors: dict[str, np.ndarray], layer: str, count: int, part: str) -> np.ndarray:
    """Take out the experts' matrices; return them as one [experts, out, in]."""
    return np.stack([tensors.pop(f"{layer}.mlp.experts.{index}.{part}.weight") for index in range(count)])


def granite_tensors(tensors: dict[str, np.ndarray], layer: str, count: int) -> dict[str, np.ndarray]:
    block, shared = f"{layer}.block_sparse_moe", f"{layer}.mlp.shared_experts"
    gate, up, down = (experts_of(tensors, layer, count, part) for part in ("gate_proj", "up_proj", "down_proj"))
    of_shared = [tensors.pop(f"{shared}.{part}.weight") for part in ("gate_proj", "up_proj")]
    return {
        f"{block}.input_linear.weight": np.concatenate([gate, up], axis=1),
        f"{block}.output_linear.weight": down,
        f"{block}.router.layer.weight": tensors.pop(f"{layer}.mlp.gate.weight"),
        f"{layer}.shared_mlp.input_linear.weight": np.concatenate(of_shared),
        f"{layer}.shared_mlp.output_linear.weight": tensors.pop(f"{shared}.down_proj.weight"),
    }


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_stacked_experts_of_granite_are_read(dtype: str, tmp_path: Path) -> None:
    options = VARIANTS["granitemoeshared"]["config"]
    config = write_config(tmp_path, options)
    tensors = drawn_tensors(config)
    stored = dict(tensors)
    for index in range(config.num_layers):
        stored |= granite_tensors(stored, f"model.layers.{index}", options["num_local_experts"])
    write_safetensors(tmp_path / "model.safetensors", stored, dtype=dtype, metadata={"format": "pt"})
    found = Checkpoint(tmp_path, config, declare_model(config)[1])
    for name, expected in tensors.items():
        np.testing.assert_allclose(found.read(name), expected, rtol=0 if dtype == "F32" else 2**-7)


def llama4_tensors(tensors: dict[str, np.ndarray], layer: str, count: int) -> dict[str, np.ndarray]:
    gate, up, down = (experts_of(tensors, layer, count, part) for part in ("gate_proj", "up_proj", "down_proj"))
    feed_forward = f"language_model.{layer}.feed_forward"
    shared = {
        f"{feed_forward}.shared_expert.{part}.weight": tensors.pop(f"{layer}.mlp.shared_experts.{part}.weight")
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    return shared | {
        f"{feed_forward}.experts.gate_up_proj": np.concatenate([gate, up], axis=1).swapaxes(1, 2),
        f"{feed_forward}.experts.down_proj": down.swapaxes(1, 2),
        f"{feed_forward}.router.weight": tensors.pop(f"{layer}.mlp.gate.weight"),
    }


@pytest.mark.parametrize("width", [48, 40], ids=["usual", "square"])
def test_text_model_of_llama4_is_read(width: int, tmp_path: Path) -> None:
    """Published files have an encoder, too; with a square matrix the shape does not show that experts are [in, out]."""
    text = VARIANTS["llama4_text"]["config"] | {"hidden_size": width, "interleave_moe_layer_step": 1}
    options = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    config = write_config(tmp_path, options | {"vision_config": {"hidden_size": 8}, "boi_token_index": 3})
    tensors = drawn_tensors(config)
    stored = dict(tensors)
    for index in range(config.num_layers):
        stored |= llama4_tensors(stored, f"model.layers.{index}", text["num_local_experts"])
    stored |= {"vision_model.class_embedding": np.zeros(8), "multi_modal_projector.linear_1.weight": np.zeros((8, 8))}
    contiguous = {name: np.ascontiguousarray(values) for name, values in stored.items()}
    write_safetensors(tmp_path / "model.safetensors", contiguous, metadata={"format": "pt"})
    found = Checkpoint(tmp_path, config, declare_model(config)[1])
    for name, expected in tensors.items():
        np.testing.assert_array_equal(found.read(name), expected)


@pytest.mark.parametrize("is_turned", [True, False])
def test_experts_are_read_in_either_layout(is_turned: bool, tmp_path: Path) -> None:
    """Qwen3-VL's published files have [experts, in, out], and transformers writes [experts, out, in]."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    options = json.loads(json.dumps(SEEING["qwen3_vl_moe a dense layer"]["config"]))
    options["text_config"]["moe_intermediate_size"] = 20
    config = write_config(tmp_path, options)
    tensors = drawn_tensors(config)
    stored, count = dict(tensors), options["text_config"]["num_experts"]
    for index in (0, 2):
        gate, up, down = (
            experts_of(stored, f"model.layers.{index}", count, part) for part in ("gate_proj", "up_proj", "down_proj")
        )
        prefix = f"model.language_model.layers.{index}.mlp.experts"
        stored |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    if is_turned:
        stored |= {name: values.swapaxes(1, 2) for name, values in stored.items() if ".experts." in name}
    contiguous = {name: np.ascontiguousarray(values) for name, values in stored.items()}
    write_safetensors(tmp_path / "model.safetensors", contiguous, metadata={"format": "pt"})
    found = Checkpoint(tmp_path, config, declare_model(config)[1])
    for name, expected in tensors.items():
        np.testing.assert_array_equal(found.read(name), expected)
