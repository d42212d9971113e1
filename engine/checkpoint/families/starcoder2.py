"""StarCoder 2 (Lozhkov et al. 2024): LayerNorms, and an MLP without a gate; everything has biases."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.families.windows import window_size
from engine.checkpoint.json_fields import JsonOptions


class Starcoder2(Family):
    name = "starcoder2"
    class_names = ("Starcoder2ForCausalLM",)
    num_kv_heads = 2
    gguf_names = MappingProxyType({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
    harmless_options = frozenset(  # of GPT BigCode, or said twice, in published files
        (
            *("activation_function", "norm_type", "mlp_type", "layer_norm_epsilon"),
            *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"),
        )
    )
    norm_kind = "layer"
    norm_epsilon_name = "norm_epsilon"
    rms_norm_eps = 1e-5
    activation = "gelu_pytorch_tanh"
    plain_mlp_names = ("c_fc", "c_proj")
    ties_word_embeddings = True

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("use_bias", True)
        return Biases(bias, bias, bias)

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return {"hidden_act": self.activation, "sliding_window": None}

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return (window_size(options, 0),) * num_layers
