"""The tensors of a GGUF file under their Hugging Face names, as float32 [out, in].

Called by the loader. llama.cpp rotates neighbouring elements of a head for Llama, where the original pairs halves, and stores
query and key rows in an order that suits; they are put back here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from engine.gguf_file import BLOCKS, GgufFile, GgufTensor
from engine.model_config import ModelConfig
from workers.formats.blocks import dequantized_blocks
from workers.formats.module import DequantizedTensor
from workers.formats.quantized import Tensor

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_THE_CONFIG = ("rope_freqs.weight",)
_BLOCK_BYTES = {name: num_bytes for name, _, num_bytes in BLOCKS.values()}


def gguf_tensors(file: GgufFile, config: ModelConfig) -> dict[str, Tensor]:
    """By Hugging Face name; those that have none keep their own, for the loader to name."""
    return {
        _plain_name(name): DequantizedTensor(tensor.shape, _reader(tensor, config))
        for name, tensor in file.tensors.items()
        if name not in _IN_THE_CONFIG
    }


def _plain_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if match and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{suffix}"
    return name


def _reader(tensor: GgufTensor, config: ModelConfig) -> Callable[[], np.ndarray]:
    is_permuted = config.architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", tensor.name)
    num_heads = config.num_attention_heads if ".attn_q." in tensor.name else config.num_kv_heads
    return partial(_read, tensor, num_heads if is_permuted else 0)


def _read(tensor: GgufTensor, num_heads: int) -> np.ndarray:
    """`num_heads`: of rows in llama.cpp's order, 0 where they are as they should be."""
    raw = np.frombuffer(tensor.file.data, np.uint8, tensor.end - tensor.begin, tensor.begin)
    values = dequantized_blocks(tensor.type_name, raw.reshape(-1, _BLOCK_BYTES[tensor.type_name])).reshape(tensor.shape)
    if not num_heads:
        return values
    pairs = values.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
