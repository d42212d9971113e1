"""Kimi Linear (Moonshot AI 2025): most layers follow the delta rule with a decay of each key; the others are DeepSeek-V3's,
without positions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from engine.checkpoint.families.deepseek_v3 import DeepseekV3
from engine.checkpoint.families.experts import RoutingDefaults
from engine.checkpoint.families.family import Latents
from engine.checkpoint.families.mamba_in_gguf import are_attending
from engine.checkpoint.families.recurrence import MAX_KERNEL, Recurrence, delta_rule, recurrent_layers
from engine.checkpoint.json_fields import JsonOptions

_SUPPORTED = {"mla_use_nope": True, "hidden_act": "silu"}


class KimiLinear(DeepseekV3):
    name = "kimi_linear"
    other_names = ()
    gguf_name = "kimi-linear"
    gguf_options = frozenset(("attention.head_count_kv",))
    gguf_names = MappingProxyType(
        {
            "ssm_conv1d_q": "self_attn.q_conv1d",
            "ssm_conv1d_k": "self_attn.k_conv1d",
            "ssm_conv1d_v": "self_attn.v_conv1d",
            "ssm_f_a": "self_attn.f_a_proj",
            "ssm_f_b": "self_attn.f_b_proj",
            "ssm_g_a": "self_attn.g_a_proj",
            "ssm_g_b": "self_attn.g_b_proj",
            "ssm_beta": "self_attn.b_proj",
            "ssm_a": "self_attn.A_log",
            "ssm_dt.bias": "self_attn.dt_bias",
            "ssm_norm": "self_attn.o_norm",
        }
    )
    class_names = ("KimiLinearForCausalLM",)
    model = "workers.models.kimi_linear:KimiLinear"
    draft_names = None
    has_rotary = False
    can_tie_word_embeddings = False
    harmless_options = frozenset(("head_dim", "qk_head_dim", "use_grouped_topk"))
    other_option_names = MappingProxyType(
        {
            "model_max_length": "max_position_embeddings",
            "num_experts": "num_local_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
            "num_expert_group": "n_group",
            "moe_renormalize": "norm_topk_prob",
            "moe_router_activation_func": "scoring_func",
        }
    )
    rms_norm_eps = 1e-5
    routing = RoutingDefaults(256, 8, 1024, num_groups=1, num_chosen_groups=1, factor=2.446, first_sparse_layer=1)
    latent_defaults = Latents(query_dim=0, latent_dim=512, plain_dim=128, rotary_dim=64, value_dim=128)

    def is_interleaved(self, options: JsonOptions) -> bool:
        return False

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        attending = are_attending(options, num_layers)
        return {
            "layer_types": ["full_attention" if each else "linear_attention" for each in attending],
            "linear_num_heads": options.count("attention.head_count"),
            "linear_head_dim": options.count("kda.head_dim"),
            "linear_conv_kernel_dim": options.count("ssm.conv_kernel"),
            "rope_interleave": None,  # there are no positions
        }

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        options.check_supported(_SUPPORTED)
        linear = options.within("linear_attn_config")
        heads = linear.count("num_heads", options.count("linear_num_heads", 32))
        dim = linear.count("head_dim", options.count("linear_head_dim", 128))
        kernel = linear.count("short_conv_kernel_size", options.count("linear_conv_kernel_dim", 4), most=MAX_KERNEL)
        attending, recurrent = linear.counts("full_attn_layers", ()), linear.counts("kda_layers", ())
        are_recurrent = [index % 4 != 0 or index == 0 for index in range(num_layers)]
        if (attending or recurrent) and options.values.get("layer_types") is None:
            if sorted(attending + recurrent) != list(range(1, num_layers + 1)):
                raise linear.error("kda_layers", f"these and full_attn_layers should be the numbers 1 to {num_layers}")
            are_recurrent = [number in recurrent for number in range(1, num_layers + 1)]
        layers = recurrent_layers(options, are_recurrent, "linear_attention")
        return delta_rule(layers, kernel, (heads, dim), (heads, dim), is_per_channel=True)
