"""LFM2 (Liquid AI 2025): most layers are short convolutions with gates before and after, the others have attention. LFM2-MoE
has experts in all layers but the first few."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Family, NormNames
from engine.checkpoint.families.mamba_in_gguf import are_attending
from engine.checkpoint.families.recurrence import MAX_KERNEL, Recurrence, recurrent_layers
from engine.checkpoint.json_fields import JsonOptions


class Lfm2(Family):
    name = "lfm2"
    gguf_name: str | None = "lfm2"
    gguf_options = frozenset(("attention.head_count_kv",))
    gguf_names = MappingProxyType(
        {
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        }
    )
    class_names: tuple[str, ...] = ("Lfm2ForCausalLM",)
    model = "workers.models.lfm2:Lfm2"
    norm_epsilon_name = "norm_eps"
    mlp_width_name = "adjusted_intermediate_size"
    norm_names = NormNames(input="operator_norm", inner="ffn_norm")
    has_head_norm = True
    recurrent_module = "conv"
    head_norm_names = ("q_layernorm", "k_layernorm")
    other_option_names = MappingProxyType({"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"})
    harmless_options = frozenset(  # transformers does not read them either
        (
            *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_use_swiglu", "block_use_xavier_init", "block_dim"),
            *("block_mlp_init_scale", "block_out_init_scale", "block_norm_eps", "num_heads", "theta", "use_pos_enc"),
        )
    )
    num_kv_heads = 8
    rms_norm_eps = 1e-5
    rope_theta = 1_000_000.0
    ties_word_embeddings = True

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        options.check_supported({"attention.causal": True})
        attending = are_attending(options, num_layers)
        return {
            "layer_types": ["full_attention" if each else "conv" for each in attending],
            "conv_L_cache": options.count("shortconv.l_cache"),
            "block_auto_adjust_ff_dim": False,
        }

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        """Return the MLPs' width, which transformers computes from the one in config.json."""
        self.check_names(text)
        width, step = text.count("intermediate_size", 12_288), text.count("block_multiple_of", 256)
        factor = text.number("block_ffn_dim_multiplier", 1.0, above=0)
        if text.flag("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            if text.values.get("block_ffn_dim_multiplier", factor) is not None:
                width = -(-int(factor * width) // step) * step
        return {"adjusted_intermediate_size": width}

    def check_names(self, text: JsonOptions) -> None:
        """Refuse two names of an option with different values: which one counts depends on the version of transformers."""
        for other, name in self.other_option_names.items():
            if text.values.get(other) not in (None, text.values.get(name)):
                raise text.error(other, f"{text.values[other]!r} should be {name}, which is {text.values[name]!r}")

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        with_attention = options.values.get("full_attn_idxs")
        indexes = range(num_layers) if with_attention is None else options.counts("full_attn_idxs", ())
        layers = recurrent_layers(options, [index not in indexes for index in range(num_layers)], "conv")
        kernel, width = options.count("conv_L_cache", 3, most=MAX_KERNEL), options.count("hidden_size")
        has_bias = options.flag("conv_bias", False)
        return Recurrence("convolution", layers, kernel, channels=width, has_bias=has_bias) if layers else None


class Lfm2Moe(Lfm2):
    name = "lfm2_moe"
    gguf_name = "lfm2moe"
    class_names = ("Lfm2MoeForCausalLM",)
    mlp_width_name = "intermediate_size"
    other_option_names = MappingProxyType({"tie_embedding": "tie_word_embeddings"})

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        self.check_names(text)
        return {"intermediate_size": 7168}

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        count = num_experts(options, "num_experts", default=32)
        first = options.count("num_dense_layers", 2, least=0)
        has_correction = options.flag("use_expert_bias", True)
        return ExpertsConfig(
            tuple(range(first, num_layers)),
            count,
            num_chosen(options, "num_experts_per_tok", 4, count),
            options.count("moe_intermediate_size", 1792),
            correction="mlp.expert_bias" if has_correction else "",
            correction_shape=(count,) if has_correction else (),
            scoring="sigmoid",
            is_normalized=options.flag("norm_topk_prob", True),
            added_to_sum=1e-6,
            factor=options.number("routed_scaling_factor", 1.0),
        )
