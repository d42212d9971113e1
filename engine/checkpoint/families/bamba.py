"""Bamba (IBM, Princeton, UIUC 2024): llama in which most layers are Mamba-2."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from engine.checkpoint.activations import read_activation
from engine.checkpoint.families import mamba_in_gguf
from engine.checkpoint.families.experts import layer_indexes
from engine.checkpoint.families.family import Biases, Family, NormNames
from engine.checkpoint.families.recurrence import MAMBA_NAMES, UNUSED_MAMBA_OPTIONS, Recurrence, read_mamba, state_spaces
from engine.checkpoint.json_fields import JsonOptions


class Bamba(Family):
    name = "bamba"
    gguf_name: str | None = None  # its GGUF files say granitehybrid, without an attention.scale
    gguf_options = frozenset(("attention.head_count_kv",))
    gguf_names = MappingProxyType(mamba_in_gguf.tensor_names("mamba"))
    is_permuted_in_gguf = True
    class_names = ("BambaForCausalLM",)
    model = "workers.models.mamba2:Mamba2"
    recurrent_module = "mamba"
    norm_names = NormNames(inner="pre_ff_layernorm")
    has_partial_rotary = True
    harmless_options = UNUSED_MAMBA_OPTIONS | {
        *("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"),
        *("partial_rotary_factor", "attn_rotary_emb"),  # transformers rotates half of each head
        *("layer_types", "layers_block_type"),  # made of `attn_layer_indices`
    }
    num_kv_heads = 8
    rms_norm_eps = 1e-5

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        attending = mamba_in_gguf.are_attending(options, num_layers)
        return {
            **mamba_in_gguf.sizes(options, MAMBA_NAMES),
            "mamba_expand": options.count("ssm.inner_size") // options.count("embedding_length"),
            "attn_layer_indices": [index for index, each in enumerate(attending) if each],
        }

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, options.flag("mlp_bias", False))

    def rotary_share(self, options: JsonOptions) -> float:
        return 0.5

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        with_attention = layer_indexes(options, "attn_layer_indices", num_layers)
        layers = tuple(index for index in range(num_layers) if index not in with_attention)
        mamba = read_mamba(options, read_activation(options, self.activation_name, self.activation), "mamba_proj_bias")
        width = options.count("mamba_expand", 2) * options.count("hidden_size")
        return state_spaces(options, layers, width, mamba)
