"""ERNIE 4.5 with experts (Baidu 2025): upper layers have experts, chosen by corrected scores, beside an MLP shared by all
tokens.
"""

from __future__ import annotations

from types import MappingProxyType

from engine.checkpoint.families.ernie4_5 import Ernie4_5
from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Biases
from engine.checkpoint.json_fields import JsonOptions

# options of Paddle's config.json that change the computation, and their supported values
_SUPPORTED = {"moe_gate": "topk", "moe_gate_act": "softmax", "moe_use_hard_gate": False, "moe_group_experts": False}


class Ernie4_5Moe(Ernie4_5):
    name = "ernie4_5_moe"
    gguf_name = "ernie4_5-moe"
    class_names: tuple[str, ...] = ("Ernie4_5_MoeForCausalLM",)
    head_dim = 0
    num_kv_heads = 4
    other_option_names = MappingProxyType({"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})

    def biases(self, options: JsonOptions) -> Biases:
        """Return the biases as in transformers: the head has one too, experts have none."""
        bias = options.flag("use_bias", False)
        return Biases(bias, bias, bias, bias)

    def check_followed(self, options: JsonOptions) -> None:
        options.check_supported(_SUPPORTED)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        self.check_followed(options)
        count = num_experts(options, "moe_num_experts", default=64)
        start, interval = options.count("moe_layer_start_index", 1, least=0), options.count("moe_layer_interval", 1)
        end = options.count("moe_layer_end_index", -1, least=-1)
        last = num_layers - 1 if end == -1 else end
        sparse = tuple(index for index in range(num_layers) if start <= index <= last and (index + 1) % interval == 0)
        if not count:
            return None
        intermediate_size = options.count("moe_intermediate_size", 1536)
        is_corrected = options.flag("moe_use_aux_free", True)
        return ExpertsConfig(
            sparse,
            count,
            num_chosen(options, "moe_k", 6, count),
            intermediate_size,
            options.count("moe_num_shared_experts", 2, least=0) * intermediate_size,
            correction="mlp.moe_statics.e_score_correction_bias" if is_corrected else "",
            correction_shape=(1, count),
            is_normalized=True,
            smallest_sum=options.number("moe_norm_min", 1e-12),
        )
