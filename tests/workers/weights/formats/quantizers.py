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

_DTYPES = {
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "F8_E4M3",
    "|V1": "U8",
    "|S1": "F8_E8M0",
    "float16": "F16",
    "float32": "F32",
}
NUM_LAYERS = json.loads((Path(DEMO) / "config.json").read_text())["num_hidden_layers"]


@dataclass
class Quantized:
    """Stored arrays of one weight [out, in], by suffix, the weight that they represent, and its entry in the metadata."""

    stored: dict[str, np.ndarray]
    weight: np.ndarray
    description: str = ""


Quantizer = Callable[[np.ndarray], Quantized]


@dataclass
class Format:
    """A storage format of checkpoints; `plain` modules stay unquantized."""

    quantize: Quantizer
    config: dict[str, Any]
    plain: tuple[str, ...] = ()


def demo_tensors() -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in SafetensorsFile(DEMO / "model.safetensors").tensors.items()}


def write_tensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file; uint8 arrays are float8 (e4m3), single bytes without a type (V1) are uint8, characters (S1)
    e8m0."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
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


def write_quantized_demo(path: Path, format: Format, num_layers: int | None = None) -> dict[str, np.ndarray]:
    """Write the embedded model in `format` as a checkpoint at `path`, or its first `num_layers` layers; return the value of
    each tensor."""
    shutil.copytree(DEMO, path, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    config, tensors = json.loads((DEMO / "config.json").read_text()), demo_tensors()
    if num_layers is not None:
        left_out = tuple(f"model.layers.{number}." for number in range(num_layers, config["num_hidden_layers"]))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
        config |= {"num_hidden_layers": num_layers, "layer_types": config["layer_types"][:num_layers]}
    return write_quantized(path, config, tensors, format)


def write_quantized(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], format: Format
) -> dict[str, np.ndarray]:
    """Write a config.json and `tensors` in `format`; return the value of each. A vision encoder is not quantized."""
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": format.config}))
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    worth: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_linear = module.endswith(("_proj", "_with_mqa")) and "visual" not in module.split(".")
        if is_linear and not module.endswith(format.plain or ("\0",)):
            quantized = format.quantize(tensor)
            stored |= {f"{module}.{suffix}": values for suffix, values in quantized.stored.items()}
            worth[name] = quantized.weight
            metadata[name] = quantized.description
        else:
            plain[name] = worth[name] = tensor
    stored |= plain  # an existing bias replaces the empty one
    write_tensors(path / "model.safetensors", stored, {name: text for name, text in metadata.items() if text})
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
    if bits == 3:  # a stream of bits, from the lowest
        bits_of = (values[..., None] >> np.arange(bits) & 1).reshape(*values.shape[:-1], -1)
        return np.packbits(bits_of.astype(np.uint8), axis=-1, bitorder="little").view(np.int32)
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


def auto_round(layout: str, bits: int = 4) -> Format:
    """AutoRound's file; `down_proj` has twice the bits in GPTQ's layout."""
    version = 2 if "gptqmodel" in layout else 1
    plain = awq(32) if "awq" in layout else gptq(bits, 32, version=version)
    wide = gptq(2 * bits, 64, version=version)
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": "awq" not in layout, "data_type": "int"}
    if "awq" in layout:
        return Format(plain.quantize, {**config, "packing_format": layout})
    extra = {r".*mlp\.down_proj": {"bits": 2 * bits, "group_size": 64}, "lm_head": {"bits": 16}}

    def quantize(weight: np.ndarray) -> Quantized:
        return (wide if weight.shape[1] == 384 else plain).quantize(weight)

    return Format(quantize, {**config, "packing_format": layout, "extra_config": extra})


# ------------------------------------------------------------------------------------------------------ bitsandbytes


_NF4 = np.array([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0], np.float32)
_NF4 = np.array([*_NF4, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1], np.float32)


def blocks_of_4_bits(kind: str, *, is_nested: bool) -> Format:
    levels = np.array([0, 0.0052, 0.6667, 1, 0.3333, 0.5, 0.1667, 0.25], np.float32)
    levels = np.concatenate([levels, -levels]) if kind == "fp4" else _NF4

    def quantize(weight: np.ndarray) -> Quantized:
        blocks = weight.reshape(-1, 64)
        largest = np.abs(blocks).max(axis=1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        stored = {"weight.absmax": largest, "weight.quant_map": levels}
        if is_nested:
            offset = float(largest.mean(dtype=np.float64))
            outer = np.array(
                [np.abs(part - offset).max() for part in np.split(largest, range(256, len(largest), 256))], np.float32
            )
            inner = np.linspace(-1, 1, 256, dtype=np.float32)
            wide = outer[np.arange(len(largest)) // 256]
            codes = np.round((largest - offset) / wide * 127.5 + 127.5).astype(np.uint8)
            stored = {"weight.absmax": codes.view("V1"), "weight.quant_map": levels}
            stored |= {"weight.nested_absmax": outer, "weight.nested_quant_map": inner}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            largest = inner[codes] * wide + np.float32(offset)
        places = np.abs(blocks[..., None] / largest[:, None, None] - levels).argmin(axis=-1).astype(np.uint8)
        pairs = places.reshape(-1, 2)
        stored["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).view("V1")
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), "V1")
        return Quantized(stored, (levels[places] * largest[:, None]).reshape(weight.shape))

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    return Format(quantize, {**config, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"]})


def llm_int8() -> Format:
    def quantize(weight: np.ndarray) -> Quantized:
        largest = np.abs(weight).max(axis=1)
        values = np.round(weight / largest[:, None] * 127).astype(np.int8)
        stored = {"weight": values, "SCB": largest, "weight_format": np.zeros((), "V1")}
        return Quantized(stored, values * (largest / np.float32(127))[:, None])

    return Format(quantize, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False})


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


def fp8_powers(dtype: str, height: int, width: int) -> Format:
    """FP8 with scales that are powers of two, stored as their exponents."""

    def quantize(weight: np.ndarray) -> Quantized:
        grid = weight.reshape(len(weight) // height, height, -1, width)
        powers = np.ceil(np.log2(np.abs(grid).max(axis=(1, 3), keepdims=True) / 448))
        codes = e4m3_codes(grid / 2**powers)
        worth = np.where(codes & 128, -_POSITIVE[codes & 127], _POSITIVE[codes & 127]) * 2**powers
        exponents = (powers + 127).astype(np.uint8).reshape(grid.shape[0], grid.shape[2])
        stored = {"weight": codes.reshape(weight.shape), "weight_scale_inv": exponents.view(dtype)}
        return Quantized(stored, worth.reshape(weight.shape).astype(np.float32))

    config = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [height, width]}
    return Format(quantize, config)


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


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def float4(layout: str) -> Format:
    """NVFP4 of `modelopt` or compressed-tensors, or MXFP4 of compressed-tensors."""
    size = 32 if layout == "mxfp4" else 16

    def quantize(weight: np.ndarray) -> Quantized:
        groups = weight.reshape(len(weight), -1, size)
        largest = np.abs(groups).max(axis=-1)
        if layout == "mxfp4":
            exponents = (np.floor(np.log2(largest)) - 2 + 127).astype(np.uint8)
            stored, scales = {"weight_scale": exponents.view("V1")}, np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        else:
            common = np.float32(largest.max() / (6 * 448))
            codes = e4m3_codes(largest / 6 / common)
            table = np.array([e4m3_value(code) for code in range(127)], np.float32)
            stored = {"weight_scale": codes}
            if layout == "modelopt":
                stored["weight_scale_2"], scales = np.array(common), table[codes] * common
            else:
                stored["weight_global_scale"], scales = np.array([1 / common]), table[codes] / (1 / common)
        places = np.abs(np.abs(groups / scales[..., None])[..., None] - _E2M1).argmin(axis=-1)
        codes = (places + 8 * (groups < 0)).astype(np.uint8).reshape(weight.shape)
        packed_codes = (codes[:, ::2] | codes[:, 1::2] << 4).view("V1")
        stored |= {"weight" if layout == "modelopt" else "weight_packed": packed_codes, "input_scale": np.ones(1, np.float32)}
        values = np.where(groups < 0, -_E2M1[places], _E2M1[places]) * scales[..., None]
        return Quantized(stored, values.reshape(weight.shape).astype(np.float32))

    if layout == "modelopt":
        return Format(quantize, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": size}
    return compressed(f"{layout}-pack-quantized", {**weights, "strategy": "tensor_group"}, quantize, ignore=["lm_head"])


# --------------------------------------------------------------------------------------------------- torchao and HQQ


def torchao(kind: str, bits: int, group_size: int, is_symmetric: bool = True) -> Format:
    """Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor (per output), or Int4Tensor with two values in a byte."""

    def quantize(weight: np.ndarray) -> Quantized:
        attributes: dict[str, Any] = {"block_size": [1, group_size if group_size > 0 else weight.shape[1]]}
        if kind == "Float8Tensor":
            found = float8(1, 0)(weight)
            stored = {"_weight_qdata": found.stored["weight"], "_weight_scale": found.stored["scale"]}
            return Quantized(stored, found.weight, json.dumps({"_type": kind, "_data": attributes}))
        size = group_size if group_size > 0 else weight.shape[1]
        group = grouped(weight, bits, np.arange(weight.shape[1]) // size, is_symmetric, np.float32 if bits == 8 else np.float16)
        middle = 1 << (bits - 1)
        signed, zeros = (group.values.astype(np.int16) - middle).astype(np.int8), (group.zeros - middle).astype(np.int8)
        if kind == "IntxUnpackedToInt8Tensor":
            attributes["target_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
        stored = {"_weight_qdata": signed, "_weight_scale": group.scales, "_weight_zero_point": zeros}
        worth = group.weight
        if kind == "Int4Tensor":
            points = (-zeros * group.scales.astype(np.float32)).astype(np.float16)
            packed = np.array([[low & 15 | (high & 15) << 4 for low, high in row.reshape(-1, 2)] for row in signed.astype(int)])
            stored = {"_weight_qdata": packed.astype(np.uint8).view(np.int8), "_weight_scale": group.scales.T}
            stored["_weight_zero_point"] = points.T
            of = np.arange(weight.shape[1]) // size
            worth = signed.astype(np.float32) * group.scales.astype(np.float32)[:, of] + points.astype(np.float32)[:, of]
        return Quantized(stored, worth, json.dumps({"_type": kind, "_data": attributes}))

    config = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"int4_packing_format": {"_data": "PLAIN"}}}}
    return Format(quantize, {"quant_method": "torchao", "quant_type": config})


def torchao_blocks(kind: str, *, is_swizzled: bool) -> Format:
    """MXTensor or NVFP4Tensor of 4 bits."""
    base = float4("mxfp4" if kind == "MXTensor" else "modelopt")

    def quantize(weight: np.ndarray) -> Quantized:
        found = base.quantize(weight)
        scales = found.stored["weight_scale"]
        attributes: dict[str, Any] = {"block_size": weight.shape[1] // scales.shape[1], "is_swizzled_scales": is_swizzled}
        stored = {"_weight_scale": swizzled(scales) if is_swizzled else scales}
        if kind == "MXTensor":
            attributes["elem_dtype"] = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}
            stored["_weight_qdata"] = found.stored["weight_packed"]
        else:
            stored["_weight_qdata"] = found.stored["weight"]
            stored["_weight_per_tensor_scale"] = found.stored["weight_scale_2"]
        return Quantized(stored, found.weight, json.dumps({"_type": kind, "_data": attributes}))

    return Format(quantize, {"quant_method": "torchao", "quant_type": {"default": {"_type": "MXFPInferenceConfig"}}})


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Return scales [rows, columns] in tiles of 128 rows and 4 columns, as cuBLAS reads them."""
    rows, columns = np.indices(scales.shape)
    tiles = np.zeros((-(-scales.shape[0] // 128), -(-scales.shape[1] // 4), 32, 4, 4), scales.dtype)
    tiles[rows // 128, columns // 4, rows % 32, rows % 128 // 32, columns % 4] = scales
    return tiles.reshape(32 * tiles.shape[0], 16 * tiles.shape[1])


def hqq(bits: int, group_size: int, axis: int = 1) -> Format:
    """Values in groups, which are rows or columns; a word has values that are a fixed number of rows apart."""
    packing = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}[bits]
    per_word = 10 if bits == 3 else 8 // bits

    def quantize(weight: np.ndarray) -> Quantized:
        cut = weight.reshape((-1, group_size) if axis else (group_size, -1))
        low, high = cut.min(axis=axis, keepdims=True), cut.max(axis=axis, keepdims=True)
        scales = ((high - low) / ((1 << bits) - 1)).astype(np.float16)
        zeros = (-low / scales.astype(np.float32)).astype(np.float16)
        factors, points = scales.astype(np.float32), zeros.astype(np.float32)
        codes = np.clip(np.round(cut / factors + points), 0, (1 << bits) - 1).astype(np.int64)
        rows = -(-len(codes) // per_word)
        padded = np.zeros((rows * per_word, codes.shape[1]), np.int64)
        padded[: len(codes)] = codes
        words = np.zeros((rows, codes.shape[1]), np.int64)
        for part in padded.reshape(per_word, rows, -1):
            words = words << bits | part
        stored: dict[str, np.ndarray] = {"W_q": words.astype(np.int32) if bits == 3 else words.astype(np.uint8).view("V1")}
        stored |= {"scale": scales, "zero": zeros, "shape": np.array(weight.shape), "packing": _text(packing)}
        numbers = {"nbits": bits, "group_size": group_size, "axis": axis}
        stored |= {name: np.array(value, np.int32) for name, value in numbers.items()}
        flags = ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config")
        stored |= {name: np.array(name.endswith(("dict", "config")), np.uint8).view("V1") for name in flags}
        stored |= {"compute_dtype": _text("torch.float16"), "unpack_view_dtype": _text("torch.uint8")}
        return Quantized(stored, ((codes.astype(np.float32) - points) * factors).reshape(weight.shape))

    parameters = {"nbits": bits, "group_size": group_size, "axis": axis, "channel_wise": True}
    config = {"weight_quant_params": parameters, "scale_quant_params": None, "zero_quant_params": None}
    return Format(quantize, {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]})


def _text(value: str) -> np.ndarray:
    return np.frombuffer(value.encode(), "V1")


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
    "gptq 2": lambda: gptq(2, 32),
    "gptq 3": lambda: gptq(3, 64),
    "gptq 3, asymmetric": lambda: gptq(3, 32, is_symmetric=False),
    "auto-round, gptq": lambda: auto_round("auto_round:auto_gptq"),
    "auto-round, gptqmodel": lambda: auto_round("auto_round:gptqmodel"),
    "auto-round, awq": lambda: auto_round("auto_round:auto_awq"),
    "nf4": lambda: blocks_of_4_bits("nf4", is_nested=False),
    "nf4, nested": lambda: blocks_of_4_bits("nf4", is_nested=True),
    "fp4": lambda: blocks_of_4_bits("fp4", is_nested=False),
    "llm.int8": llm_int8,
    "nvfp4": lambda: float4("nvfp4"),
    "nvfp4, modelopt": lambda: float4("modelopt"),
    "mxfp4": lambda: float4("mxfp4"),
    "packed 4": lambda: pack_quantized(4, 32),
    "packed 4, asymmetric": lambda: pack_quantized(4, 128, is_symmetric=False),
    "packed 4, act-order": lambda: pack_quantized(4, 64, has_order=True),
    "packed 8": lambda: pack_quantized(8, -1),
    "packed 8, asymmetric": lambda: pack_quantized(8, 32, is_symmetric=False),
    "int8, channels": lambda: int_quantized(-1),
    "int8, groups, asymmetric": lambda: int_quantized(64, is_symmetric=False),
    "fp8 blocks": fp8_blocks,
    "fp8 blocks with rests": lambda: fp8_blocks(96, 80),
    "fp8 blocks, e8m0": lambda: fp8_powers("S1", 64, 128),
    "fp8 rows, exponents as bytes": lambda: fp8_powers("V1", 1, 32),
    "fp8 tensor": fp8_tensor,
    "float8 tensor": lambda: float_quantized("tensor"),
    "float8 channel": lambda: float_quantized("channel"),
    "float8 block": lambda: float_quantized("block"),
    "torchao int8": lambda: torchao("Int8Tensor", 8, -1),
    "torchao int8, groups": lambda: torchao("Int8Tensor", 8, 32, is_symmetric=False),
    "torchao int4": lambda: torchao("Int4Tensor", 4, 64, is_symmetric=False),
    "torchao int4, unpacked": lambda: torchao("IntxUnpackedToInt8Tensor", 4, 32),
    "torchao float8": lambda: torchao("Float8Tensor", 8, -1),
    "torchao mxfp4": lambda: torchao_blocks("MXTensor", is_swizzled=True),
    "torchao nvfp4": lambda: torchao_blocks("NVFP4Tensor", is_swizzled=False),
    "hqq 8": lambda: hqq(8, 64),
    "hqq 4": lambda: hqq(4, 64),
    "hqq 3": lambda: hqq(3, 32),
    "hqq 2": lambda: hqq(2, 16),
    "hqq 4, axis 0": lambda: hqq(4, 64, axis=0),
}
