"""Nemotron-H (NVIDIA 2025): each layer is one of Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.checkpoint.activations import read_activation
from engine.checkpoint.families import mamba_in_gguf
from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Biases, Family, NormNames
from engine.checkpoint.families.recurrence import Mamba, MambaNames, Recurrence, layer_kinds, state_spaces
from engine.checkpoint.json_fields import JsonOptions

_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # in `hybrid_override_pattern`
_DEFAULT_KINDS = ("linear_attention", "moe", "full_attention", "mlp")
_NAMES = MambaNames(
    ("mamba_num_heads", 128),
    ("mamba_head_dim", 64),
    ("n_groups", 8),
    ("ssm_state_size", 128),
    ("conv_kernel", 4),
    "use_conv_bias",
)


class NemotronH(Family):
    name = "nemotron_h"
    gguf_options = frozenset(("attention.head_count_kv", "feed_forward_length"))
    gguf_names = MappingProxyType(
        {
            **mamba_in_gguf.tensor_names("mamba"),
            **{"ffn_latent_down": "mlp.fc1_latent_proj", "ffn_latent_up": "mlp.fc2_latent_proj"},
        }
    )
    is_permuted_in_gguf = True
    class_names = ("NemotronHForCausalLM",)
    model = "workers.models.nemotron_h:NemotronH"
    norm_epsilon_name = "layer_norm_epsilon"
    activation_name = "mlp_hidden_act"
    activation = "relu2"
    recurrent_module = "mamba"
    norm_names = NormNames(input="norm", inner="")
    plain_mlp_names = ("up_proj", "down_proj")
    has_rotary = False
    can_tie_word_embeddings = False
    unused_tensors = r"^mtp\."
    other_option_names = MappingProxyType(
        {
            **{"layer_types": "layers_block_type", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel"},
            **{"mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias", "num_local_experts": "n_routed_experts"},
        }
    )
    harmless_options = frozenset(
        (
            *("chunk_size", "mamba_chunk_size", "expand", "mamba_expand", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
            *("time_step_limit", "time_step_max", "time_step_floor", "time_step_rank", "rms_norm_eps", "residual_in_fp32"),
            *("mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor", "attention_head_dim", "num_logits_to_keep"),
            *("n_shared_experts", "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type"),
            *("mtp_hybrid_override_pattern", "hybrid_override_pattern", "norm_eps", "num_query_groups"),
        )
    )
    num_kv_heads = 8
    head_dim = 128
    rms_norm_eps = 1e-5

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        widths = mamba_in_gguf.by_layer(options, "feed_forward_length", num_layers)
        of_mlp = "moe" if options.values.get("expert_count") else "mlp"
        attending = mamba_in_gguf.are_attending(options, num_layers)
        kinds = [
            "full_attention" if has_attention else of_mlp if width else "linear_attention"
            for has_attention, width in zip(attending, widths, strict=True)
        ]
        return {
            **mamba_in_gguf.sizes(options, _NAMES),
            "layers_block_type": kinds,
            "mlp_hidden_act": "relu2",
        }

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        kinds = self._kinds(text)
        count = text.values.get("num_hidden_layers")
        if count not in (None, len(kinds)):
            raise text.error("num_hidden_layers", f"{count} should be {len(kinds)}, the number of entries of the layers' kinds")
        return {"num_hidden_layers": len(kinds), "intermediate_size": 21_504}

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(False, False, options.flag("mlp_bias", False))

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        has_bias = options.flag("use_bias", False)
        least = options.number("time_step_min", 0.001, least=0)
        activation = read_activation(options, "mamba_hidden_act", "silu")
        mamba = Mamba(activation, least, has_input_bias=has_bias, has_output_bias=has_bias)
        return state_spaces(options, self._layers(options, "linear_attention"), 0, mamba, _NAMES)

    def attention_layers(self, options: JsonOptions, num_layers: int, recurrence: Recurrence | None) -> tuple[int, ...] | None:
        return self._layers(options, "full_attention")

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        count = num_experts(options, "n_routed_experts", default=8)
        groups, sparse = options.count("n_group", 1), self._layers(options, "moe")
        if sparse and (not count or count % groups):
            raise options.error("n_group", f"{groups} does not divide {count} experts")
        chosen_groups = options.count("topk_group", 1, most=groups)
        chosen = num_chosen(options, "num_experts_per_tok", 2, count // groups * chosen_groups if sparse else 1 << 20)
        config = ExpertsConfig(
            sparse,
            count,
            chosen,
            options.count("moe_intermediate_size", 7688),
            options.count("moe_shared_expert_intermediate_size", 7688),
            correction="mlp.gate.e_score_correction_bias",
            correction_shape=(count,),
            scoring="sigmoid",
            is_normalized=options.flag("norm_topk_prob", True),
            added_to_sum=1e-20,
            factor=options.number("routed_scaling_factor", 1.0),
            num_groups=groups,
            num_chosen_groups=chosen_groups,
            latent_size=options.count("moe_latent_size", 0),
        )
        return config if sparse else None

    def _layers(self, options: JsonOptions, kind: str) -> tuple[int, ...]:
        return tuple(index for index, each in enumerate(self._kinds(options)) if each == kind)

    def _kinds(self, options: JsonOptions) -> tuple[str, ...]:
        """Return the kind of each layer, from a list of words or, in older files, a string of letters."""
        if options.values.get("layers_block_type") is not None:
            return layer_kinds(options, "layers_block_type", tuple(_KINDS.values()))
        pattern = options.text("hybrid_override_pattern", "")
        if not pattern:
            return _DEFAULT_KINDS
        if set(pattern) - set(_KINDS):
            raise options.error("hybrid_override_pattern", f"{pattern!r} should consist of {', '.join(_KINDS)}")
        return tuple(_KINDS[letter] for letter in pattern)
