"""gpt-oss (OpenAI 2025): experts with biases and a clamped gate in every layer, a learned attention sink for each query head,
and a window in every second layer."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.families.windows import layer_windows, window_size
from engine.checkpoint.json_fields import JsonOptions


class GptOss(Family):
    name = "gpt_oss"
    class_names = ("GptOssForCausalLM",)
    num_kv_heads = 8
    gguf_name = "gpt-oss"
    gguf_options = frozenset(("attention.sliding_window",))
    gguf_names = {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"}
    harmless_options = frozenset(("experts_per_token", "initial_context_length"))  # of the published files, read by nothing
    head_dim = 64
    rms_norm_eps = 1e-5
    rope_theta = 150_000.0
    default_rope = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    has_sinks = True
    has_interleaved_experts = True

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return {"sliding_window": options.count("attention.sliding_window")}

    def rope_of_gguf(self, options: JsonOptions) -> dict[str, Any]:
        return {"truncate": False}

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", True)
        return Biases(bias, bias, False)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return layer_windows(options, window_size(options, 128), [index % 2 == 0 for index in range(num_layers)])

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        count = num_experts(options, "num_local_experts", "num_experts", default=128)
        return ExpertsConfig(
            tuple(range(num_layers)),
            count,
            num_chosen(options, "num_experts_per_tok", 4, count),
            options.count("intermediate_size", 2880),
            is_normalized=True,
            has_biases=True,
            gate_alpha=options.number("swiglu_alpha", 1.702),
            gate_limit=options.number("swiglu_limit", 7.0, above=0),
        )
