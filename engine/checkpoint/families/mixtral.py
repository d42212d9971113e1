"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.mistral import Mistral
from engine.checkpoint.json_fields import JsonOptions


class Mixtral(Mistral):
    name = "mixtral"
    gguf_name = "llama"  # with experts
    is_permuted_in_gguf = True
    class_names = ("MixtralForCausalLM",)
    default_window = 0
    rms_norm_eps = 1e-5
    rope_theta = 1_000_000.0

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        count = num_experts(options, "num_local_experts", "num_experts", default=8)
        chosen = num_chosen(options, "num_experts_per_tok", 2, count)
        width = options.count("intermediate_size")
        return ExpertsConfig(tuple(range(num_layers)), count, chosen, width, is_normalized=True)
