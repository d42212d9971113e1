"""Other shapes and options of the supported architectures, each with what transformers answers.

In `tests/golden/drawn`, `variants.json` holds, per variant, a config.json in its original style, a prompt and the expected
greedy tokens and log-probabilities; `seeing.json` the same of models that see, with pictures and video. The weights are not
stored: they are drawn by `values`, which the tests share with `make.py` and `make_seeing.py` (run by hand where torch and
transformers are installed). `left_out.json` holds what transformers reads when an option is left out (`left_out.py`)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

SCALE = 0.15
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight `name`: normal numbers that depend on the name alone; norms and learned factors around 1; limits on
    both sides of 0."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32) * np.float32(SCALE)
    if not shape:
        limit = np.float32(0.5) + np.abs(np.asarray(drawn))
        return -limit if name.endswith("_min") else limit
    return drawn + np.float32(1) if re.search("norm|layer_scalar|router.scale|per_expert_scale|std_scale", name) else drawn


def published_name(name: str) -> str:
    """Return the older of two names that a weight of a vision model may have."""
    name = name.replace(".feed_forward.", ".mlp.")
    name = re.sub(r"^model\.(vision_tower|embed_vision)\.", r"\1.", name)
    name = re.sub(r"(position_embedding_table|layer_scalar|router\.scale)$", r"\1.weight", name)
    name = re.sub(r"^language_model\.", "", re.sub(r"^model\.language_model\.", "model.", name))
    return re.sub(
        r"^model\.(visual|vision_model)\.", r"\1.", name.replace("mm_input_projection_weight", "mm_input_projection.weight")
    )


def is_first(name: str) -> bool:
    """Return whether a weight is not of a second layer or expert, which have the shapes of the first."""
    return not re.search(r"\.[1-9]\d*\.", name)


def stacked(name: str, shape: tuple[int, ...], values_of: Callable[[str, tuple[int, ...]], np.ndarray]) -> np.ndarray:
    """Return a tensor as gpt-oss stores it; `values_of` those of our names: experts are one tensor [experts, in, out], with
    gate and up in alternating columns."""
    match = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?", name)
    if match is None:
        return values_of(
            re.sub(r"self_attn\.sinks$", "self_attn.sinks.weight", name.replace(".mlp.router.", ".mlp.gate.")), shape
        )
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    suffix, own = "bias" if match[3] else "weight", (shape[-1] // len(parts), *shape[1:-1])
    result = np.empty(shape, np.float32)
    for expert in range(shape[0]):
        for index, part in enumerate(parts):
            result[expert, ..., index :: len(parts)] = values_of(f"{match[1]}.{expert}.{part}.{suffix}", own).T
    return result


def joined(
    name: str, shape: tuple[int, ...], values_of: Callable[[str, tuple[int, ...]], np.ndarray], config: dict[str, Any]
) -> np.ndarray:
    """Return a tensor as Qwen3-Next and Qwen3.5 store it; `values_of` those of our names: queries and gates of a head are one
    tensor, and in Qwen3-Next so are all projections of a key head of a recurrent layer."""

    def side_by_side(count: int, *parts: tuple[str, int]) -> np.ndarray:
        """Join `count` runs of rows of each part; a part's rows are `first` and the next of the tensor with its name."""
        found = []
        for own, width in parts:
            found.append(values_of(f"{prefix}.{own}.{suffix}", (count * width, *shape[1:])).reshape(count, width, *shape[1:]))
        return np.concatenate(found, axis=1).reshape(shape)

    stem, _, suffix = name.rpartition(".")
    prefix, _, module = stem.rpartition(".")
    config = config.get("text_config", config)
    if module == "q_proj":
        return side_by_side(config["num_attention_heads"], ("q_proj", config["head_dim"]), ("gate_proj", config["head_dim"]))
    if module not in ("in_proj_qkvz", "in_proj_ba"):
        return values_of(name, shape)
    heads = config["linear_num_key_heads"]
    shared = config["linear_num_value_heads"] // heads
    if module == "in_proj_ba":
        return side_by_side(heads, ("in_proj_b", shared), ("in_proj_a", shared))
    keys, width = config["linear_key_head_dim"], shared * config["linear_value_head_dim"]
    all_three = values_of(f"{prefix}.in_proj_qkv.{suffix}", (heads * (2 * keys + width), *shape[1:]))
    queries, others, of_values = np.split(all_three, [heads * keys, 2 * heads * keys])
    gates = values_of(f"{prefix}.in_proj_z.{suffix}", of_values.shape)
    runs = [part.reshape(heads, -1, *shape[1:]) for part in (queries, others, of_values, gates)]
    return np.concatenate(runs, axis=1).reshape(shape)


def mxfp4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks and scales of weights [..., in], each value rounded to the nearest."""
    groups = weights.reshape(*weights.shape[:-1], -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6))
    scaled = groups / np.exp2(exponents)[..., None]
    numbers = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
    codes = (numbers | np.where(scaled < 0, 8, 0)).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = np.where(codes > 7, -1, 1) * E2M1[codes & 7] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)
