"""Quantizers for tests, as plain as possible: a model's linear weights in each format, and the values that they represent. They
round to nearest and share no code with the tested one: words are packed value by value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.demo import MODEL as DEMO
from workers.weights.safetensors import SafetensorsFile

_DTYPES = {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "F8_E4M3", "float16": "F16", "float32": "F32"}
NUM_LAYERS = json.loads((Path(DEMO) / "config.json").read_text())["num_hidden_layers"]


@dataclass
class Quantized:
    """Stored arrays of one weight [out, in], by suffix, and the weight that they represent."""

    stored: dict[str, np.ndarray]
    weight: np.ndarray


Quantizer = Callable[[np.ndarray], Quantized]


@dataclass
class Format:
    """A storage format of checkpoints; `plain` modules stay unquantized."""

    quantize: Quantizer
    config: dict[str, Any]
    plain: tuple[str, ...] = ()


def demo_tensors() -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in SafetensorsFile(DEMO / "model.safetensors").tensors.items()}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one safetensors file; uint8 arrays are float8."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": _DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_quantized_demo(path: Path, format: Format) -> dict[str, np.ndarray]:
    """Write the embedded model in `format` as a checkpoint at `path`; return the value of each tensor."""
    shutil.copytree(DEMO, path, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    return write_quantized(path, json.loads((DEMO / "config.json").read_text()), demo_tensors(), format)


def write_quantized(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], format: Format
) -> dict[str, np.ndarray]:
    """Write a config.json and `tensors` in `format`; return the value of each. A vision encoder is not quantized."""
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": format.config}))
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    worth: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_linear = module.endswith(("_proj", "_with_mqa")) and "visual" not in module.split(".")
        if is_linear and not module.endswith(format.plain or ("\0",)):
            quantized = format.quantize(tensor)
            stored |= {f"{module}.{suffix}": values for suffix, values in quantized.stored.items()}
            worth[name] = quantized.weight
        else:
            plain[name] = worth[name] = tensor
    stored |= plain  # an existing bias replaces the empty one
    write_tensors(path / "model.safetensors", stored)
    return worth


# ---------------------------------------------------------------------------------------------------------- integers


@dataclass
class Grouped:
    """Unsigned values [out, in], with a scale and a zero point for each output and group of inputs [out, groups]."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_of: np.ndarray  # of each input

    @property
    def weight(self) -> np.ndarray:
        zeros, scales = self.zeros.astype(np.float32), self.scales.astype(np.float32)
        return (self.values.astype(np.float32) - zeros[:, self.group_of]) * scales[:, self.group_of]


def grouped(weight: np.ndarray, bits: int, group_of: np.ndarray, is_symmetric: bool, scale_dtype: type = np.float16) -> Grouped:
    """Round to nearest between the extremes of each group."""
    num_groups, top = int(group_of.max()) + 1, (1 << bits) - 1
    scales = np.zeros((len(weight), num_groups), scale_dtype)
    zeros = np.full((len(weight), num_groups), 1 << (bits - 1), np.int64)
    for group in range(num_groups):
        part = weight[:, group_of == group]
        if is_symmetric:
            scales[:, group] = np.abs(part).max(axis=1) / ((1 << (bits - 1)) - 1)
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = np.clip(np.round(-low / scales[:, group].astype(np.float32)), 0, top)
    wide = scales.astype(np.float32)[:, group_of]
    values = np.clip(np.round(weight / wide) + zeros[:, group_of], 0, top).astype(np.int64)
    return Grouped(values, scales, zeros, group_of)


def packed(values: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Return int32 words along the last axis: place i of a word has value `order[i]` of its neighbours."""
    per_word = 32 // bits
    padding = -values.shape[-1] % per_word
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    words = np.zeros((*values.shape[:-1], values.shape[-1] // per_word), np.uint32)
    for place in range(per_word):
        source = order[place] if order else place
        words |= values[..., source::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def in_order(num_inputs: int, group_size: int) -> np.ndarray:
    return np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)


def awq(group_size: int) -> Format:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def quantize(weight: np.ndarray) -> Quantized:
        found = grouped(weight, 4, in_order(weight.shape[1], group_size), is_symmetric=False)
        stored = {
            "qweight": packed(found.values.T, 4, order),
            "qzeros": packed(found.zeros.T, 4, order),
            "scales": found.scales.T,
        }
        return Quantized(stored, found.weight)

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Format(quantize, {**config, "modules_to_not_convert": ["lm_head"]})


def gptq(bits: int, group_size: int, *, is_symmetric: bool = True, has_order: bool = False, version: int = 1) -> Format:
    def quantize(weight: np.ndarray) -> Quantized:
        group_of = in_order(weight.shape[1], group_size)
        if has_order:
            group_of = np.random.default_rng(weight.shape[1]).permutation(group_of)
        found = grouped(weight, bits, group_of, is_symmetric)
        stored_zeros = (found.zeros - (version == 1)) & ((1 << bits) - 1)
        stored = {
            "qweight": packed(found.values, bits).T,
            "qzeros": packed(stored_zeros.T, bits),
            "scales": found.scales.T,
            "g_idx": group_of.astype(np.int32),
            "bias": np.zeros(len(weight), np.float16),  # as AutoGPTQ does
        }
        return Quantized(stored, found.weight)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": is_symmetric, "desc_act": has_order}
    return Format(quantize, {**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"})


# ------------------------------------------------------------------------------------------------ compressed-tensors


def compressed(layout: str, weights: dict[str, Any], quantize: Quantizer, **more: Any) -> Format:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, **more}
    return Format(quantize, config)


def pack_quantized(bits: int, group_size: int, *, is_symmetric: bool = True, has_order: bool = False) -> Format:
    """Pack for compressed-tensors. `group_size` -1: a scale for each output."""

    def quantize(weight: np.ndarray) -> Quantized:
        group_of = in_order(weight.shape[1], group_size)
        if has_order:
            group_of = np.random.default_rng(weight.shape[1]).permutation(group_of)
        found = grouped(weight, bits, group_of, is_symmetric)
        stored = {
            "weight_packed": packed(found.values, bits),
            "weight_scale": found.scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not is_symmetric:
            stored["weight_zero_point"] = packed(found.zeros.T, bits).T
        if has_order:
            stored["weight_g_idx"] = group_of.astype(np.int32)
        return Quantized(stored, found.weight)

    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "actorder": "group" if has_order else None}
    return compressed("pack-quantized", {**weights, **strategy}, quantize, ignore=["lm_head"])


def int_quantized(group_size: int, *, is_symmetric: bool = True) -> Format:
    def quantize(weight: np.ndarray) -> Quantized:
        found = grouped(weight, 8, in_order(weight.shape[1], group_size), is_symmetric, np.float32)
        stored = {"weight": (found.values - 128).astype(np.int8), "weight_scale": found.scales}
        if not is_symmetric:
            stored["weight_zero_point"] = (found.zeros - 128).astype(np.int8)
        return Quantized(stored, found.weight)

    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    return compressed("int-quantized", {"num_bits": 8, "type": "int", "symmetric": is_symmetric, **strategy}, quantize)


# --------------------------------------------------------------------------------------------------------------- FP8


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1 if code >= 128 else 1, code % 128 // 8, code % 8
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_POSITIVE = np.array([e4m3_value(code) for code in range(127)])


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """Return the nearest codes."""
    middles = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2
    return (np.searchsorted(middles, np.abs(values)) + 128 * (values < 0)).astype(np.uint8)


def float8(height: int, width: int) -> Quantizer:
    """Quantize with a scale for each rectangle of `height` outputs and `width` inputs; 0: all."""

    def quantize(weight: np.ndarray) -> Quantized:
        tall, wide = height or weight.shape[0], width or weight.shape[1]
        scales = np.zeros((-(-weight.shape[0] // tall), -(-weight.shape[1] // wide)), np.float32)
        codes, worth = np.zeros(weight.shape, np.uint8), np.zeros(weight.shape, np.float32)
        for row, column in np.ndindex(*scales.shape):
            place = np.s_[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]
            scales[row, column] = np.abs(weight[place]).max() / 448
            codes[place] = e4m3_codes(weight[place] / scales[row, column])
            worth[place] = np.array([e4m3_value(code) for code in range(256)], np.float32)[codes[place]] * scales[row, column]
        return Quantized({"weight": codes, "scale": scales}, worth)

    return quantize


def _renamed(quantize: Quantizer, name: str, shape: tuple[int, ...] | None = None) -> Quantizer:
    def renamed(weight: np.ndarray) -> Quantized:
        found = quantize(weight)
        scale = found.stored.pop("scale")
        found.stored[name] = scale if shape is None else scale.reshape(shape)
        found.stored["input_scale"] = np.ones(1, np.float32)  # of static activations
        return found

    return renamed


def fp8_blocks(height: int = 128, width: int = 128) -> Format:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [height, width]}
    format = Format(_renamed(float8(height, width), "weight_scale_inv"), config, plain=("o_proj",))
    format.config["modules_to_not_convert"] = [f"model.layers.{index}.self_attn.o_proj" for index in range(NUM_LAYERS)]
    return format


def fp8_tensor() -> Format:
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    return Format(_renamed(float8(0, 0), "weight_scale", ()), config)


def float_quantized(strategy: str) -> Format:
    quantize = {"tensor": float8(0, 0), "channel": float8(1, 0), "block": float8(64, 128)}[strategy]
    shape = (1,) if strategy == "tensor" else None
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [64, 128]
    format = compressed("float-quantized", weights, _renamed(quantize, "weight_scale", shape), ignore=["re:.*down_proj"])
    format.plain = ("down_proj",)
    return format


FORMATS: dict[str, Callable[[], Format]] = {
    "awq, groups of 32": lambda: awq(32),
    "awq, groups of 128": lambda: awq(128),
    "awq, one group": lambda: awq(-1),
    "gptq 4": lambda: gptq(4, 64),
    "gptq 4, asymmetric": lambda: gptq(4, 32, is_symmetric=False),
    "gptq 4, version 2": lambda: gptq(4, 128, is_symmetric=False, version=2),
    "gptq 4, act-order": lambda: gptq(4, 32, is_symmetric=False, has_order=True),
    "gptq 8": lambda: gptq(8, -1),
    "gptq 8, asymmetric": lambda: gptq(8, 32, is_symmetric=False),
    "packed 4": lambda: pack_quantized(4, 32),
    "packed 4, asymmetric": lambda: pack_quantized(4, 128, is_symmetric=False),
    "packed 4, act-order": lambda: pack_quantized(4, 64, has_order=True),
    "packed 8": lambda: pack_quantized(8, -1),
    "packed 8, asymmetric": lambda: pack_quantized(8, 32, is_symmetric=False),
    "int8, channels": lambda: int_quantized(-1),
    "int8, groups, asymmetric": lambda: int_quantized(64, is_symmetric=False),
    "fp8 blocks": fp8_blocks,
    "fp8 blocks with rests": lambda: fp8_blocks(96, 80),
    "fp8 tensor": fp8_tensor,
    "float8 tensor": lambda: float_quantized("tensor"),
    "float8 channel": lambda: float_quantized("channel"),
    "float8 block": lambda: float_quantized("block"),
}
