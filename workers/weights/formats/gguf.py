"""Tensors of a GGUF file under their Hugging Face names, decoded to [out, in].

Called by the loader. For Llama, llama.cpp rotates neighbouring elements of a head, while the original pairs halves, so it
stores query and key rows in another order; they are reordered here.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator

import msgspec
import numpy as np

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.families.family import Family
from engine.checkpoint.gguf.file import BLOCKS, GgufTensor
from engine.checkpoint.gguf.parts import GgufModel
from engine.checkpoint.model_config import ModelConfig
from ops.weight_format import QuantizedWeight, WeightFormat
from workers.weights.formats.block_types import INTEGERS, PLAIN, decoded_blocks, dequantized_blocks
from workers.weights.formats.gguf_recurrent import restored
from workers.weights.formats.integers import in_format
from workers.weights.formats.module import DecodedTensor
from workers.weights.formats.tensor import Kept, Tensor

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
_OF_THE_TRUNK = {  # what an MTP layer takes from the trunk if it has none: names there, the first that exists
    "shared_head.norm": ("model.norm",),
    "shared_head.head": ("lm_head", "model.embed_tokens"),
}
_OF_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_OF_FUSED = {"qkv_proj": ("attn_qkv", "self_attn.qkv_proj"), "gate_up_proj": ("ffn_up", "mlp.gate_up_proj")}
_IN_THE_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK_VALUES = {name: num_values for name, num_values, _ in BLOCKS.values()}
_BLOCK_BYTES = {name: num_bytes for name, _, num_bytes in BLOCKS.values()}


def gguf_tensors(file: GgufModel, config: ModelConfig) -> dict[str, Tensor]:
    """Return tensors by Hugging Face name; unknown ones keep their own, for the loader's error."""
    named = (entry for name, tensor in file.tensors.items() if name not in _IN_THE_CONFIG for entry in _named(tensor, config))
    found = {name: _decoded(tensor, config) for name, tensor in named}
    num_layers = config.num_layers + config.num_draft_layers
    for index in range(num_layers if config.latents else 0):
        whole = f"model.layers.{index}.self_attn.kv_b_proj.weight"
        keys, values = (found.pop(f"blk.{index}.attn_{part}_b.weight", None) for part in "kv")
        if keys and values and whole not in found:
            found[whole] = _keys_and_values(keys, values)
    for index in range(config.num_layers, num_layers):
        for own, others in _OF_THE_TRUNK.items():
            shared = next((found[f"{other}.weight"] for other in others if f"{other}.weight" in found), None)
            if shared is not None:
                found.setdefault(f"model.layers.{index}.{own}.weight", shared)
    found = {own: tensor for name, tensor in found.items() if (own := _draft_name(name, config))}
    return dict(restored(found, config) if config.recurrence else found)


def _draft_name(name: str, config: ModelConfig) -> str:
    """Return the name in checkpoints of a tensor of an MTP layer, which files name like a layer behind the others; empty: it is
    not read. Other tensors keep their name."""
    names = FAMILIES[config.architecture].draft_names
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None or int(match[1]) < config.num_layers:
        return name
    if names is None:
        return ""
    own = names.of(int(match[1]) - config.num_layers, config.num_layers)
    special = {"enorm": own.embedding_norm, "hnorm": own.hidden_norm, "eh_proj": own.projection}
    special |= {"shared_head.norm": own.norm, "shared_head.head": own.head}
    return f"{special.get(match[2]) or f'{own.layer}.{match[2]}'}.{match[3]}"


def _keys_and_values(keys: DecodedTensor, values: DecodedTensor) -> DecodedTensor:
    """Join keys [heads, latent, plain] and values [heads, value, latent] to one linear [heads * (plain + value), latent]."""

    def read() -> np.ndarray:
        parts = np.concatenate([keys.read().swapaxes(1, 2), values.read()], axis=1)
        return parts.reshape(-1, parts.shape[-1])

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        raise AssertionError(f"joined keys and values cannot be kept as {format}")

    heads, latent, plain = keys.shape
    return DecodedTensor((heads * (plain + values.shape[1]), latent), read, read, lambda: None, read_integers)


def _named(tensor: GgufTensor, config: ModelConfig) -> Iterator[tuple[str, GgufTensor]]:
    """Yield tensors by Hugging Face name. The experts of a layer are one tensor [experts, out, in], and the correction of their
    scores has a different name and shape in each family."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", tensor.name)
    layer = f"model.layers.{match[1]}" if match else ""
    if match and match[2] in _OF_EXPERTS and len(tensor.shape) == (2 if match[3] == "bias" else 3):
        parts = _OF_EXPERTS[match[2]]
        num_bytes = (tensor.end - tensor.begin) // tensor.shape[0] // len(parts)
        shape = (tensor.shape[1] // len(parts), *tensor.shape[2:])
        for expert, (index, part) in itertools.product(range(tensor.shape[0]), enumerate(parts)):
            begin = tensor.begin + (expert * len(parts) + index) * num_bytes
            name = f"{layer}.mlp.experts.{expert}.{part}.{match[3]}"
            yield name, msgspec.structs.replace(tensor, shape=shape, begin=begin, end=begin + num_bytes)
    elif match and match[2] == "exp_probs_b" and config.experts and tensor.shape == (config.experts.num_experts,):
        yield f"{layer}.{config.experts.correction}", msgspec.structs.replace(tensor, shape=config.experts.correction_shape)
    elif match and match[2] == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        yield _plain_name(tensor.name, FAMILIES[config.architecture]), msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
    else:
        yield _plain_name(tensor.name, FAMILIES[config.architecture]), tensor


@functools.cache
def _names_of(family: Family) -> dict[str, str]:
    """Return the names of a layer's modules: in GGUF files -> in checkpoints."""
    norms = family.norm_names
    of_norms = {
        "attn_norm": norms.input,
        "post_attention_norm": norms.attended,
        "ffn_norm": norms.inner,
        "post_ffw_norm": norms.added,
    }
    fused = dict(_OF_FUSED[name] for name in family.fused_names)
    mlp = {f"ffn_{part}": f"{family.mlp_name}.{part}_proj" for part in ("gate", "up", "down")}
    return _INNER | mlp | {name: module for name, module in of_norms.items() if module} | fused | dict(family.gguf_names)


def _plain_name(name: str, family: Family) -> str:
    module, _, suffix = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", name)
    if match is None:
        return name
    layer, own = f"model.layers.{match[1]}", match[2]
    if own in family.gguf_names:
        return f"{layer}.{family.gguf_names[own]}"
    module, _, suffix = own.rpartition(".")
    return f"{layer}.{_names_of(family)[module]}.{suffix}" if module in _names_of(family) else name


def _decoded(tensor: GgufTensor, config: ModelConfig) -> DecodedTensor:
    is_rotated = re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", tensor.name) is not None
    is_permuted = is_rotated and FAMILIES[config.architecture].is_permuted_in_gguf
    num_heads = config.num_attention_heads if ".attn_q." in tensor.name else config.num_kv_heads
    num_permuted = num_heads if is_permuted else 0

    def read() -> np.ndarray:
        values = dequantized_blocks(tensor.type_name, _blocks(tensor))
        return _in_order(values.reshape(tensor.shape), num_permuted)

    def kept() -> Kept:
        return INTEGERS[tensor.type_name][0] if tensor.type_name in INTEGERS else None

    def read_integers(format: WeightFormat) -> QuantizedWeight:
        stored, values, scales, offsets = INTEGERS[tensor.type_name][0], *decoded_blocks(tensor.type_name, _blocks(tensor))

        def rows(part: np.ndarray) -> np.ndarray:
            return _in_order(part.reshape(tensor.shape[0], -1), num_permuted)

        weight = QuantizedWeight(stored, rows(values), rows(scales), None if offsets is None else rows(offsets))
        return in_format(weight, format)

    def read_plain() -> np.ndarray:
        if tensor.type_name not in PLAIN:
            return read()
        dtype = PLAIN[tensor.type_name]
        values = np.frombuffer(tensor.file.data, dtype, math.prod(tensor.shape), tensor.begin)
        return _in_order(values.reshape(tensor.shape), num_permuted)

    def read_columns(columns: slice) -> np.ndarray:
        size = _BLOCK_VALUES[tensor.type_name]
        if tensor.type_name in PLAIN or num_permuted or columns.start % size or columns.stop % size:
            return read_plain()[:, columns]
        rows = _blocks(tensor).reshape(tensor.shape[0], -1, _BLOCK_BYTES[tensor.type_name])
        blocks = rows[:, columns.start // size : columns.stop // size].reshape(-1, rows.shape[-1])
        return dequantized_blocks(tensor.type_name, blocks).reshape(len(rows), -1)

    def read_rows(begin: int, end: int) -> np.ndarray:
        if tensor.type_name in PLAIN:
            return read_plain()[begin:end]
        rows = _blocks(tensor).reshape(tensor.shape[0], -1, _BLOCK_BYTES[tensor.type_name])[begin:end]
        return dequantized_blocks(tensor.type_name, rows.reshape(-1, rows.shape[-1])).reshape(len(rows), -1)

    has_rows = len(tensor.shape) == 2 and not num_permuted
    return DecodedTensor(
        *(tensor.shape, read, read_plain, kept, read_integers),
        read_columns=read_columns,
        read_rows=read_rows if has_rows else None,
    )


def _blocks(tensor: GgufTensor) -> np.ndarray:
    raw = np.frombuffer(tensor.file.data, np.uint8, tensor.end - tensor.begin, tensor.begin)
    return raw.reshape(-1, _BLOCK_BYTES[tensor.type_name])


def _in_order(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Restore the original order of rows. `num_heads`: of rows in llama.cpp's order, 0: already in order."""
    if not num_heads:
        return values
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    ordered: np.ndarray = pairs.swapaxes(1, 2).reshape(values.shape)
    return ordered
