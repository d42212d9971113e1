"""Tensors of a quantized checkpoint as those of the original model: one weight in place of qweight, scales, ...

Called by the loader. The stored tensors tell which modules are quantized; a module that the configuration excludes but that is
stored quantized is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from engine.checkpoint.quantization_config import QuantizationConfig, Storage
from engine.errors import CheckpointError
from workers.weights.formats.awq import awq_weight
from workers.weights.formats.bitsandbytes import blocks_weight, bytes_weight
from workers.weights.formats.float4 import float4_weight
from workers.weights.formats.gptq import gptq_weight
from workers.weights.formats.hqq import hqq_weight
from workers.weights.formats.module import DecodedTensor, QuantizedModule
from workers.weights.formats.scaled import float_weight, int_weight, packed_weight
from workers.weights.formats.stacked_floats import StackedFloats, scales_name, stacked_floats
from workers.weights.formats.stacked_modules import stacked_modules
from workers.weights.formats.tensor import Tensor
from workers.weights.formats.torchao import torchao_weight
from workers.weights.safetensors import StoredTensor

_WEIGHTS: dict[Storage, Callable[[QuantizedModule], DecodedTensor]] = {
    "awq": awq_weight,
    "gptq": gptq_weight,
    "packed": packed_weight,
    "int": int_weight,
    "float": float_weight,
    "nvfp4": float4_weight,
    "mxfp4": float4_weight,
    "bnb4": blocks_weight,
    "bnb8": bytes_weight,
    "torchao": torchao_weight,
    "hqq": hqq_weight,
}
_MAIN: dict[Storage, tuple[str, ...]] = {  # what a quantized module has one of
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "packed": ("weight_packed",),
    "int": ("weight",),
    "float": ("weight",),
    "nvfp4": ("weight_packed", "weight"),
    "mxfp4": ("weight_packed",),
    "bnb4": ("weight",),
    "bnb8": ("weight",),
    "torchao": ("_weight_qdata",),
    "hqq": ("W_q",),
}
_OTHERS = (
    *("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "weight_scale_2", "SCB", "weight_format"),
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    *("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"),
)
_OWN: dict[Storage, tuple[str, ...]] = {  # in place of _OTHERS
    "torchao": (
        *("_weight_scale", "_weight_zero_point", "_weight_act_pre_scale"),
        "_weight_per_tensor_scale",
        *("_weight_act_quant_scale", "_weight_act_quant_zero_point", "_weight_act_per_tensor_scale"),  # of activations
    ),
    "hqq": (
        *("scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
        *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
        *("channel_wise", "optimize", "round_zero"),
    ),
}
_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj)(_\w+|\.\w+)?$")
_OF_ACTIVATIONS = (  # quantization of activations, which is ignored
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
)


def decoded(
    tensors: dict[str, StoredTensor], config: QuantizationConfig, metadata: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Return `tensors` with the weights [out, in] of quantized modules in place of their stored tensors; `metadata`: of the
    files. Raises CheckpointError."""
    by_module: dict[str, dict[str, StoredTensor]] = {}
    stacked = _stacked_floats(tensors, config)
    used = {each.name for experts in stacked.values() for each in (experts.codes, experts.scales)}
    used |= {f"{name}_{suffix}" for name in stacked for suffix in ("input_scale", "activation_scale")}  # ignored
    matrices: dict[str, Tensor] = {}
    for name, experts, names in stacked_modules(tensors, config, metadata or {}, _decoded_module):
        matrices[name] = experts
        used |= names
    for name, tensor in tensors.items():
        if name in used:
            continue
        if config.method != "mxfp4" and not tensor.is_float and len(tensor.shape) > 1 and _STACKED.search(name):
            raise CheckpointError(
                f"{name} has the quantized experts of a layer in one tensor ({tensor.dtype} {list(tensor.shape)}), which is "
                "supported for MXFP4, for FP8 with scales beside it, and for packed compressed-tensors and torchao; use a "
                "checkpoint with separate tensors for each expert, or the unquantized model with --quantization wint4 or wint8"
            )
        module_name, separator, part = name.partition(".weight.")
        module_name, suffix = (module_name, f"weight.{part}") if separator else _split(name)
        by_module.setdefault(module_name, {})[suffix] = tensor
    found: dict[str, Tensor] = {**stacked, **matrices}
    for module_name, parts in by_module.items():
        module = _quantized_module(module_name, parts, config, metadata or {})
        if module:
            found[f"{module_name}.weight"] = _decoded_module(module)
        hidden = {*_OF_ACTIVATIONS, *(_own_suffixes(module.scheme.storage) if module else ())}
        found.update({f"{module_name}.{suffix}": part for suffix, part in parts.items() if suffix not in hidden})
    return _without_empty_biases(found, config)


def _stacked_floats(tensors: dict[str, StoredTensor], config: QuantizationConfig) -> dict[str, StackedFloats]:
    """Return the experts of a layer that are stored as one tensor of 8-bit floats, with scales beside it."""
    found = {}
    for name, tensor in tensors.items():
        match = _STACKED.search(name)
        if match is None or match[2] or tensor.dtype != "F8_E4M3" or len(tensor.shape) != 3:
            continue
        scheme, scales = config.scheme_of(name), scales_name(name, tensors)
        if scheme is not None and scheme.storage == "float" and scales:
            found[name] = stacked_floats(tensor, tensors[scales], scheme)
    return found


def _decoded_module(module: QuantizedModule) -> DecodedTensor:
    return _WEIGHTS[module.scheme.storage](module)


def _own_suffixes(storage: Storage) -> tuple[str, ...]:
    return (*_OWN.get(storage, _OTHERS), *_MAIN[storage])


def _split(name: str) -> tuple[str, str]:
    module_name, _, suffix = name.rpartition(".")
    return module_name, suffix


def _quantized_module(
    name: str, parts: dict[str, StoredTensor], config: QuantizationConfig, metadata: Mapping[str, str]
) -> QuantizedModule | None:
    scheme = config.scheme_of(name)
    main = next((parts[suffix] for suffix in _MAIN[scheme.storage] if suffix in parts), None) if scheme else None
    if scheme is None or main is None or (main.is_float and scheme.storage != "hqq"):  # HQQ may call its bytes floats
        return None
    if config.is_ignored(name):
        raise CheckpointError(f"{name} is stored quantized, but the checkpoint's list of unquantized modules has it")
    return QuantizedModule(name, scheme, parts, metadata)


def _without_empty_biases(tensors: dict[str, Tensor], config: QuantizationConfig) -> dict[str, Tensor]:
    """Drop the biases, all zero, that AutoGPTQ stores for modules without any."""
    if config.method != "gptq":
        return tensors

    def is_empty(name: str) -> bool:
        weight = tensors.get(f"{name.removesuffix('.bias')}.weight")
        return name.endswith(".bias") and isinstance(weight, DecodedTensor) and not tensors[name].read().any()

    return {name: tensor for name, tensor in tensors.items() if not is_empty(name)}
