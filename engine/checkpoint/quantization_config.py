"""`quantization_config` of a checkpoint as one checked, frozen value.

Read by `model_config.py` in every process that reads a checkpoint, and used by the worker's loader (`workers/weights/formats`).
Formats that cannot be dequantized exactly are rejected here, before any process starts. Quantization of activations is ignored:
the engine computes in its own precision with the weights of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from engine.checkpoint.json_fields import JsonOptions

Storage = Literal["awq", "gptq", "packed", "int", "float", "nvfp4", "mxfp4", "bnb4", "bnb8", "torchao", "hqq"]


class WeightScheme(msgspec.Struct, frozen=True):
    """Storage of one kind of weights. `num_bits` is 0 if each tensor has its own. `block` is the rectangle (outputs, inputs)
    that shares a scale; 0: the whole dimension. `zero_offset` is added to stored zero points. With `is_reordered`, an index
    gives the group of each input."""

    storage: Storage
    num_bits: int
    block: tuple[int, int]
    has_zero_points: bool = False
    zero_offset: int = 0
    is_reordered: bool = False
    targets: tuple[str, ...] = ("Linear",)  # module names, `re:` patterns of them, or Linear for all


class QuantizationConfig(msgspec.Struct, frozen=True):
    """Schemes by module; `ignored` modules are stored as they are."""

    method: str
    schemes: tuple[WeightScheme, ...]
    ignored: tuple[str, ...] = ()

    @staticmethod
    def read(options: JsonOptions) -> QuantizationConfig:
        """Read the object in `options`. Raises CheckpointError if it is not supported."""
        is_mlx = "bits" in options.values and "group_size" in options.values  # and no method
        method = options.text("quant_method", "mlx" if is_mlx else None)
        if method not in _METHODS:
            raise options.error(
                "quant_method",
                f"{method!r} is not supported; expected one of {', '.join(_METHODS)}; serve the unquantized model with "
                "--quantization wint4 or wint8, or a version of it in one of these formats",
            )
        return _METHODS[method](options)

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Return the scheme of the linear `module` (a name) if it is stored quantized; a target that names it takes
        precedence."""
        named = [scheme for scheme in self.schemes if any(_names(target, module) for target in scheme.targets)]
        general = [scheme for scheme in self.schemes if "Linear" in scheme.targets]
        return next(iter((*named, *general)), None)

    def is_ignored(self, module: str) -> bool:
        if self.method == "compressed-tensors":
            return any(_names(entry, module) for entry in self.ignored)
        return any(f".{entry}." in f".{module}." for entry in self.ignored)


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module


def _choice(options: JsonOptions, name: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        raise options.error(name, f"{value!r} is not supported; supported: {', '.join(map(repr, supported))}")


def _group_size(options: JsonOptions, default: int | None = None) -> int:
    """Return the number of inputs that share a scale; 0: all (-1 in the file)."""
    size = options.count("group_size", default, least=-1)
    if size == 0:
        raise options.error("group_size", "0 is not supported; expected -1 or a positive size")
    return max(size, 0)


# ------------------------------------------------------------------------------------------------------ AWQ and GPTQ


def _read_awq(options: JsonOptions) -> QuantizationConfig:
    bits = options.count("bits")
    _choice(options, "bits", bits, (4,))
    _choice(options, "version", options.text("version", "gemm").lower(), ("gemm",))
    scheme = WeightScheme("awq", bits, (1, _group_size(options)), has_zero_points=options.flag("zero_point", True))
    return QuantizationConfig("awq", (scheme,), options.texts("modules_to_not_convert"))


def _read_gptq(options: JsonOptions) -> QuantizationConfig:
    bits = options.count("bits")
    _choice(options, "bits", bits, (2, 3, 4, 8))
    name = "checkpoint_format" if "checkpoint_format" in options.values else "format"  # older writers
    layout = options.text(name, "gptq")
    _choice(options, name, layout, ("gptq", "gptq_v2"))
    _choice(options, "is_marlin_format", options.flag("is_marlin_format", False), (False,))
    _choice(options, "pack_dtype", options.text("pack_dtype", "int32"), ("int32",))
    for pattern, changes in options.mapping("dynamic").items():
        if changes and not pattern.startswith("-:"):
            raise options.error(
                "dynamic",
                f"{pattern!r} sets its own bits or group size, which is not supported; only excluded modules (-:) are",
            )
    scheme = WeightScheme(
        "gptq",
        bits,
        (1, _group_size(options)),
        has_zero_points=not options.flag("sym", True),
        zero_offset=1 if layout == "gptq" else 0,
        is_reordered=options.flag("desc_act", False),
    )
    return QuantizationConfig("gptq", (scheme,), options.texts("modules_to_not_convert"))


def _read_auto_round(options: JsonOptions) -> QuantizationConfig:
    """Read AutoRound's own file, which is GPTQ's or AWQ's with other options. Modules may have their own bits."""
    _choice(options, "data_type", options.text("data_type", "int"), ("int",))
    layout = options.text("packing_format", options.text("backend", "auto_round:auto_gptq"))
    name = "packing_format" if "packing_format" in options.values else "backend"
    _choice(options, name, layout, (*_AUTO_ROUND_GPTQ, *_AUTO_ROUND_AWQ))

    def scheme(values: JsonOptions, targets: tuple[str, ...]) -> WeightScheme:
        bits = values.count("bits")
        is_symmetric = values.flag("sym", True)
        if layout in _AUTO_ROUND_AWQ:
            _choice(values, "bits", bits, (4,))
            return WeightScheme("awq", bits, (1, _group_size(values)), has_zero_points=not is_symmetric, targets=targets)
        _choice(values, "bits", bits, (2, 3, 4, 8))
        block = (1, _group_size(values))
        return WeightScheme(
            "gptq", bits, block, has_zero_points=not is_symmetric, zero_offset=_AUTO_ROUND_GPTQ[layout], targets=targets
        )

    schemes = [scheme(options, ("Linear",))]
    extra = options.within("extra_config")
    for module in extra.values:
        own = extra.within(module)
        if own.count("bits", 16) < 16:
            prefix = f"quantization_config.extra_config.{module}."
            merged = JsonOptions({**options.values, **own.values}, options.path, prefix)
            target = f"re:{module}" if "*" in module else module
            _check_pattern(options, "extra_config", target)
            schemes.append(scheme(merged, (target,)))
    return QuantizationConfig("gptq" if layout in _AUTO_ROUND_GPTQ else "awq", tuple(schemes))


_AUTO_ROUND_GPTQ = {
    "auto_round:auto_gptq": 1,
    "auto_gptq": 1,
    "auto_round:gptqmodel": 0,
    "auto_round": 0,
}  # added to zero points
_AUTO_ROUND_AWQ = ("auto_round:auto_awq", "auto_awq")

# ------------------------------------------------------------------------------------------------------ bitsandbytes


def _read_bitsandbytes(options: JsonOptions) -> QuantizationConfig:
    has_8, has_4 = (options.flag(name, options.flag(f"_{name}", False)) for name in ("load_in_8bit", "load_in_4bit"))
    if has_8 == has_4:
        raise options.error("load_in_4bit", "either load_in_4bit or load_in_8bit should be true")
    if has_4:
        _choice(options, "bnb_4bit_quant_storage", options.text("bnb_4bit_quant_storage", "uint8"), ("uint8",))
    scheme = WeightScheme("bnb4", 4, (1, 0)) if has_4 else WeightScheme("bnb8", 8, (1, 0))
    return QuantizationConfig("bitsandbytes", (scheme,))


# ---------------------------------------------------------------------------------------------------- torchao and HQQ


def _read_torchao(options: JsonOptions) -> QuantizationConfig:
    """Read what forbids loading; files of tensors say how each is stored."""
    if isinstance(options.values.get("quant_type"), str):
        raise options.error(
            "quant_type",
            f"{options.values['quant_type']!r} is the notation of older versions, which stored pickles; save the model again "
            "with transformers 5, or use the unquantized model with --quantization wint4 or wint8",
        )
    for name, layout in _packing_formats(options.mapping("quant_type")):
        if layout not in _TORCHAO_LAYOUTS:
            raise options.error(
                "quant_type",
                f"{name} is {layout!r}, a layout for one device, which is not supported; quantize with "
                f"{' or '.join(map(repr, _TORCHAO_LAYOUTS))}, or use the unquantized model with --quantization wint4 or wint8",
            )
    return QuantizationConfig("torchao", (WeightScheme("torchao", 0, (1, 0)),))


_TORCHAO_LAYOUTS = ("PLAIN", "UNPACKED_TO_INT8")


def _packing_formats(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the packing formats in nested configurations, with their names."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        if str(name).endswith("_packing_format"):
            yield str(name), str(inner.get("_data") if isinstance(inner, dict) else inner).upper()
        else:
            yield from _packing_formats(inner)


def _read_hqq(options: JsonOptions) -> QuantizationConfig:
    """Read what forbids loading; each module stores its own bits and groups."""
    config = options.mapping("quant_config")
    for each in (config, *config.values()):
        for name in ("scale_quant_params", "zero_quant_params"):
            if isinstance(each, dict) and each.get(name):
                raise options.error(
                    "quant_config", f"{name} is set; quantized scales and zero points are not supported; quantize without them"
                )
    return QuantizationConfig("hqq", (WeightScheme("hqq", 0, (1, 0)),))


# --------------------------------------------------------------------------------------------------------------- FP8


def _read_fp8(options: JsonOptions) -> QuantizationConfig:
    _choice(options, "fmt", options.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    _choice(options, "scale_fmt", options.text("scale_fmt", "float"), ("float", "ue8m0"))
    _choice(options, "expert_dtype", options.text("expert_dtype", "fp8"), ("fp8",))
    block = (1, 32) if options.values.get("quant_method") == "mxfp8" else (0, 0)
    if options.values.get("weight_block_size"):
        block = _block(options, "weight_block_size")
    ignored = (*options.texts("modules_to_not_convert"), *options.texts("ignored_layers"))
    return QuantizationConfig("fp8", (WeightScheme("float", 8, block),), ignored)


def _read_modelopt(options: JsonOptions) -> QuantizationConfig:
    """Read the options of NVIDIA's Model Optimizer."""
    algorithm = options.text("quant_algo", None)
    _choice(options, "quant_algo", algorithm, ("FP8", "MXFP8", "NVFP4"))
    if algorithm != "NVFP4":
        return QuantizationConfig("modelopt", (WeightScheme("float", 8, (1, 32) if algorithm == "MXFP8" else (0, 0)),))
    _choice(options, "group_size", options.count("group_size", 16), (16,))
    return QuantizationConfig("modelopt", (WeightScheme("nvfp4", 4, (1, 16)),))


def _block(options: JsonOptions, name: str) -> tuple[int, int]:
    sizes = options.numbers(name)
    if len(sizes) != 2 or any(size < 1 or size != int(size) for size in sizes):
        raise options.error(name, f"{list(sizes)} should be two positive integers: outputs and inputs")
    return int(sizes[0]), int(sizes[1])


# ------------------------------------------------------------------------------------------------ compressed-tensors


_FORMATS: dict[str, Storage] = {
    "pack-quantized": "packed",
    "int-quantized": "int",
    "naive-quantized": "int",
    "float-quantized": "float",
    "mxfp8-quantized": "float",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
}
_FLOAT4_GROUPS: dict[Storage, int] = {"nvfp4": 16, "mxfp4": 32}


def _read_compressed_tensors(options: JsonOptions) -> QuantizationConfig:
    sparsity = options.within("sparsity_config")
    _choice(sparsity, "format", sparsity.text("format", "dense"), ("dense",))
    if options.mapping("transform_config"):
        raise options.error("transform_config", "transforms (rotations) are not supported; use a checkpoint without them")
    groups = options.within("config_groups")
    schemes = [_compressed_scheme(options, groups.within(name)) for name in groups.values]
    if not schemes:
        raise options.error("config_groups", "is empty; expected at least one group")
    return QuantizationConfig("compressed-tensors", tuple(schemes), _module_names(options, "ignore"))


def _module_names(options: JsonOptions, name: str) -> tuple[str, ...]:
    """Read names of modules, and patterns of them."""
    found = options.texts(name)
    for each in found:
        _check_pattern(options, name, each)
    return found


def _check_pattern(options: JsonOptions, name: str, text: str) -> None:
    """Raise CheckpointError if a name of modules is an invalid pattern."""
    try:
        re.compile(text[3:] if text.startswith("re:") else "")
    except (re.error, RecursionError, OverflowError) as error:
        raise options.error(name, f"{text[:80]!r} is no regular expression ({error}); correct it") from error


def _compressed_scheme(options: JsonOptions, group: JsonOptions) -> WeightScheme:
    weights = group.within("weights")
    if not weights.values:
        raise group.error("weights", "is missing; groups that quantize only activations are not supported")
    holder = group if group.values.get("format") else options
    layout = holder.text("format", None)
    _choice(holder, "format", layout, tuple(_FORMATS))
    kind, bits = weights.text("type", "int"), weights.count("num_bits")
    if layout == "naive-quantized" and kind == "float":
        layout = "float-quantized"
    storage = _FORMATS[layout]
    if storage in _FLOAT4_GROUPS:
        size = _FLOAT4_GROUPS[storage]
        _choice(weights, "type", kind, ("float",))
        _choice(weights, "num_bits", bits, (4,))
        _choice(weights, "group_size", weights.count("group_size", size), (size,))
        return WeightScheme(storage, 4, (1, size), targets=_module_names(group, "targets") or ("Linear",))
    _choice(weights, "type", kind, ("float" if storage == "float" else "int",))
    _choice(weights, "num_bits", bits, (8,) if storage != "packed" else (4, 8))
    _choice(weights, "dynamic", weights.values.get("dynamic") or False, (False,))
    is_symmetric = weights.flag("symmetric", True)
    if storage == "float":
        _choice(weights, "symmetric", is_symmetric, (True,))
    return WeightScheme(
        storage,
        bits,
        _strategy_block(weights),
        has_zero_points=not is_symmetric,
        is_reordered=weights.values.get("actorder") in ("group", "dynamic", True),
        targets=_module_names(group, "targets") or ("Linear",),
    )


def _strategy_block(weights: JsonOptions) -> tuple[int, int]:
    strategy = weights.text("strategy", "group" if weights.values.get("group_size") else "tensor")
    _choice(weights, "strategy", strategy, ("tensor", "channel", "group", "block"))
    if strategy == "block":
        return _block(weights, "block_structure")
    if strategy == "group":
        return 1, _group_size(weights)
    return (1, 0) if strategy == "channel" else (0, 0)


_METHODS: dict[str, Callable[[JsonOptions], QuantizationConfig]] = {
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,  # older writers
    "awq": _read_awq,
    "bitsandbytes": _read_bitsandbytes,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "hqq": _read_hqq,
    "mxfp8": _read_fp8,
    "modelopt": _read_modelopt,
    "torchao": _read_torchao,
    "mxfp4": lambda options: QuantizationConfig("mxfp4", ()),  # its tensors have names of their own
}
