"""Gemma 3 (Google 2025): norms before and after attention and MLP, which scale by 1 + weight; Qwen3's head norms; most layers
have a sliding window and a rotation of their own."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.family import Family, Multipliers, NormNames
from engine.checkpoint.families.windows import all_but_every, layer_windows, window_size
from engine.checkpoint.json_fields import JsonOptions


class Gemma3(Family):
    name = "gemma3_text"
    layers_of_27b = 62
    caps_scores = False  # transformers reads attn_logit_softcapping, but does not apply it
    caps_logits = True
    default_softcap_of_logits = 0.0
    class_names: tuple[str, ...] = ("Gemma3ForCausalLM", "Gemma3TextModel")
    num_kv_heads = 4
    other_trunk_names = ("Gemma3Text",)
    gguf_name: str | None = "gemma3"
    gguf_options = frozenset(("attention.sliding_window",))
    activation_name = "hidden_activation"
    harmless_options = frozenset(
        ("hidden_act", "sliding_window_size", "attn_logit_softcapping", "final_logit_softcapping")  # two of older files
    )
    activation = "gelu_pytorch_tanh"
    ties_word_embeddings = True
    head_dim = 256
    has_head_norm = True
    norm_offset = 1.0
    norm_names = NormNames(
        attended="post_attention_layernorm", inner="pre_feedforward_layernorm", added="post_feedforward_layernorm"
    )
    rope_theta = 1_000_000.0
    local_rope_theta = 10_000.0

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        window = options.count("attention.sliding_window", 0, least=0)
        return self.scaling_of_gguf(options, num_layers) | {
            "sliding_window": window or None,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": options.number("rope.freq_base_swa", 10_000.0),
        }

    def scaling_of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        """Return activation and scale of scores. llama.cpp knows by the number of layers which model scales scores by
        hidden_size / heads (27B), not by the width of a head."""
        scalar = options.count("attention.key_length", 256)
        if num_layers == self.layers_of_27b:
            scalar = options.count("embedding_length") // options.count("attention.head_count")
        return {"hidden_activation": self.activation, "query_pre_attn_scalar": scalar}

    def multipliers(self, options: JsonOptions) -> Multipliers:
        scores = options.number("query_pre_attn_scalar", 256.0, above=0) ** -0.5
        return Multipliers(
            embedding=options.count("hidden_size") ** 0.5,
            scores=scores,
            softcap_of_scores=self.softcap(options, "attn_logit_softcapping", 50.0) if self.caps_scores else 0.0,
            softcap_of_logits=self.softcap(options, "final_logit_softcapping", self.default_softcap_of_logits)
            if self.caps_logits
            else 0.0,
        )

    @staticmethod
    def softcap(options: JsonOptions, name: str, default: float) -> float:
        """Return 0 for none."""
        if name in options.values and options.values[name] is None:
            return 0.0
        return options.number(name, default, least=0)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        are_sliding = all_but_every(options.count("sliding_window_pattern", 6), num_layers)
        window = window_size(options, 4096)
        if self.sees_both_ways(options):
            window = window // 2 + 1
        return layer_windows(options, window, are_sliding)

    def is_bidirectional(self, options: JsonOptions) -> bool:
        return self.sees_both_ways(options) or super().is_bidirectional(options)

    @staticmethod
    def sees_both_ways(options: JsonOptions) -> bool:
        found = options.flag("use_bidirectional_attention", False)
        if found:
            options.check_supported({"is_causal": True})
        return found
