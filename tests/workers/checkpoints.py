"""Checkpoints made by tests: a config.json and random weights, in any layout, dtype and number of files that tools write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from tests.workers.variants import joined, mxfp4, stacked, values
from workers.models import declare_model

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "transformers_version": "5.0.0",
}


def write_config(path: Path, config: dict[str, Any]) -> ModelConfig:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return ModelConfig.read(path)


def drawn_tensors(config: ModelConfig, *, has_drafts: bool = False) -> dict[str, np.ndarray]:
    """Return every tensor of the model in the Hugging Face layout, with or without its layers that draft."""
    _, weights = declare_model(config, has_drafts=has_drafts)
    return {name: values(name, shape) for name, shape in weights.shapes().items()}


def to_paddle_layout(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with linear weights as [in, out]; embeddings and norms stay."""
    return {
        name: np.ascontiguousarray(tensor.T) if tensor.ndim == 2 and "embed_tokens" not in name else tensor
        for name, tensor in tensors.items()
    }


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], *, dtype: str = "F32", metadata: dict[str, str] | None = None
) -> None:
    """Write one file; `dtype` may be F32, F16, F64, BF16 or U16 (the latter two: bfloat16, rounded to zero)."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = bytearray()
    for name, tensor in tensors.items():
        is_packed = tensor.dtype == np.uint8
        raw = tensor.tobytes() if is_packed else stored(tensor, dtype)
        header[name] = {
            "dtype": "U8" if is_packed else dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def stored(tensor: np.ndarray, dtype: str) -> bytes:
    if dtype in ("BF16", "U16"):
        return (tensor.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return tensor.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]).tobytes()


def write_checkpoint(path: Path, config: dict[str, Any]) -> ModelConfig:
    """Write a complete checkpoint with random weights."""
    model = write_config(path, config)
    tensors = drawn_tensors(model)
    if model.architecture == "gpt_oss":
        tensors = to_gpt_oss_layout(tensors, is_packed=model.quantization is not None)
    write_safetensors(path / "model.safetensors", with_joined(tensors, model, config), metadata={"format": "pt"})
    return model


def with_joined(tensors: dict[str, np.ndarray], model: ModelConfig, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors with the projections that the family's checkpoints store as one."""
    if FAMILIES[model.architecture].has_query_gate:
        tensors = to_joined_layout(tensors, config)
    if model.recurrence is not None and model.recurrence.mamba is not None:
        tensors = to_mamba_layout(tensors)
    return tensors


def to_joined_layout(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of Qwen3-Next or Qwen3.5 as these store them."""
    is_by_key_head = config["model_type"] == "qwen3_next"
    others = {"gate_proj": "q_proj", "in_proj_z": "in_proj_qkv", "in_proj_a": "in_proj_b"}
    whole = {"q_proj": "q_proj", "in_proj_qkv": "in_proj_qkvz", "in_proj_b": "in_proj_ba"}
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        prefix, _, suffix = name.rpartition(".")
        prefix, _, module = prefix.rpartition(".")
        is_joined = prefix.endswith("self_attn") or (prefix.endswith("linear_attn") and is_by_key_head)
        if is_joined and module in others:
            continue
        if is_joined and module in whole:
            other = next(each for each, first in others.items() if first == module)
            rows = len(tensor) + len(tensors[f"{prefix}.{other}.{suffix}"])
            name = f"{prefix}.{whole[module]}.{suffix}"
            tensor = joined(name, (rows, *tensor.shape[1:]), lambda own, _: tensors[own], config)
        found[name] = tensor
    return found


def to_mamba_layout(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the projections of each recurrent layer as one."""
    others = {name: name.replace(".in_proj.", ".dt_proj.") for name in tensors if ".in_proj." in name}
    joined = {name: np.concatenate([tensors[name], tensors[other]]) for name, other in others.items()}
    return {name: joined.get(name, tensor) for name, tensor in tensors.items() if name not in others.values()}


def to_gpt_oss_layout(tensors: dict[str, np.ndarray], *, is_packed: bool) -> dict[str, np.ndarray]:
    """Return the tensors under their published names, with the experts of a layer as one tensor. `is_packed`: in MXFP4."""

    def published(name: str) -> str:
        name = name.replace(".mlp.gate.", ".mlp.router.").replace(".sinks.weight", ".sinks")
        name = re.sub(r"\.experts\.\d+\.(gate|up)_proj", ".experts.gate_up_proj", name)
        name = re.sub(r"\.experts\.\d+\.down_proj", ".experts.down_proj", name)
        return re.sub(
            r"(\.experts\.\w+)\.(weight|bias)$", lambda match: match[1] + ("_bias" if match[2] == "bias" else ""), name
        )

    num_experts = 1 + max(int(found[1]) for found in map(re.compile(r".*\.experts\.(\d+)\.").match, tensors) if found)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        other = published(name)
        if ".experts." in name:
            shapes[other] = (num_experts, *tensor.shape[:0:-1], len(tensor) * (2 if "gate_up" in other else 1))
        else:
            shapes[other] = tensor.shape
    found = {name: stacked(name, shape, lambda own, _: tensors[own]) for name, shape in shapes.items()}
    if is_packed:
        for name in [name for name in found if ".experts." in name and found[name].ndim == 3]:
            blocks, scales = mxfp4(found.pop(name).swapaxes(1, 2))
            found |= {f"{name}_blocks": blocks.reshape(*scales.shape, 16), f"{name}_scales": scales}
    return found
