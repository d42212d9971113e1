"""Mamba-2 (Dao and Gu 2024): recurrent layers alone, without attention and MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.checkpoint.activations import read_activation
from engine.checkpoint.families import mamba_in_gguf
from engine.checkpoint.families.family import Family, NormNames
from engine.checkpoint.families.recurrence import UNUSED_MAMBA_OPTIONS, MambaNames, Recurrence, read_mamba, state_spaces
from engine.checkpoint.json_fields import JsonOptions

_NAMES = MambaNames(
    ("num_heads", 128), ("head_dim", 64), ("n_groups", 8), ("state_size", 128), ("conv_kernel", 4), "use_conv_bias"
)
_MAX_POSITIONS = 1 << 20  # config.json has no limit


class Mamba2(Family):
    name = "mamba2"
    gguf_options = frozenset(("attention.head_count", "feed_forward_length"))
    gguf_names = MappingProxyType(mamba_in_gguf.tensor_names("mamba"))
    class_names = ("Mamba2ForCausalLM",)
    model = "workers.models.mamba2:Mamba2"
    norm_epsilon_name = "layer_norm_epsilon"
    recurrent_module = "mamba"
    norm_names = NormNames(input="norm", inner="")
    has_rotary = False
    harmless_options = UNUSED_MAMBA_OPTIONS | {"chunk_size", "residual_in_fp32", "norm_before_gate", "rms_norm"}
    rms_norm_eps = 1e-5

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        missing = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"))
        expand = options.count("ssm.inner_size") // options.count("embedding_length")
        return {**missing, **mamba_in_gguf.sizes(options, _NAMES), "expand": expand}

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        """Return what only attention and MLPs read, which there are none of, and the longest text."""
        heads = text.count(*_NAMES.num_heads)
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 1}
        return sizes | {"head_dim": text.count(*_NAMES.head_dim), "max_position_embeddings": _MAX_POSITIONS}

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        mamba = read_mamba(options, read_activation(options, self.activation_name, self.activation), "use_bias")
        width = options.count("expand", 2) * options.count("hidden_size")
        return state_spaces(options, tuple(range(num_layers)), width, mamba, _NAMES)
