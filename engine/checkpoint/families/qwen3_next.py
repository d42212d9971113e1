"""Qwen3-Next (Qwen team 2025): three of four layers are recurrent and follow the gated delta rule; the others have attention
with a gate for each output. Experts in all layers or some."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from engine.checkpoint.families.drafts import QWEN3
from engine.checkpoint.families.experts import ExpertsConfig, RoutingDefaults, interleaved_experts
from engine.checkpoint.families.family import Family
from engine.checkpoint.families.recurrence import Recurrence, gated_delta
from engine.checkpoint.families.windows import all_but_every
from engine.checkpoint.json_fields import JsonOptions


class Qwen3Next(Family):
    name = "qwen3_next"
    gguf_name: str | None = "qwen3next"
    gguf_names = MappingProxyType(
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_in": "linear_attn.in_proj_qkvz",  # of older files, in place of the two above
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_a": "linear_attn.A_log",
            "ssm_dt.bias": "linear_attn.dt_bias",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        }
    )
    class_names: tuple[str, ...] = ("Qwen3NextForCausalLM",)
    model = "workers.models.qwen3_next:Qwen3Next"
    norm_offset = 1.0
    num_kv_heads = 2
    head_dim = 256
    has_head_norm = True
    has_query_gate = True
    recurrent_module = "linear_attn"
    has_joined_inputs = True
    has_partial_rotary = True
    partial_rotary_factor = 0.25
    draft_names = QWEN3

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        value_heads = options.count("ssm.time_step_rank")
        return {
            "layer_types": _kinds(options, num_layers),
            "linear_conv_kernel_dim": options.count("ssm.conv_kernel"),
            "linear_num_key_heads": options.count("ssm.group_count"),
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": options.count("ssm.state_size"),
            "linear_value_head_dim": options.count("ssm.inner_size") // value_heads,
        }

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        return gated_delta(options, num_layers)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        experts = interleaved_experts(options, num_layers, RoutingDefaults(512, 10, 512))
        if experts is None:
            return None
        return msgspec.structs.replace(
            experts,
            shared_intermediate_size=options.count("shared_expert_intermediate_size", 512),
            has_shared_gate=True,
            is_normalized=options.flag("norm_topk_prob", True),
        )


def _kinds(options: JsonOptions, num_layers: int) -> list[str]:
    """Return `layer_types` from the metadata of a GGUF file."""
    every = options.count("full_attention_interval", 4)
    are_recurrent = options.values.get("attention.recurrent_layers", all_but_every(every, num_layers))
    if not isinstance(are_recurrent, list | tuple) or len(are_recurrent) < num_layers:  # MTP layers come last
        raise options.error(
            "attention.recurrent_layers", f"{are_recurrent!r} should have a flag for each of {num_layers} layers"
        )
    return ["linear_attention" if each else "full_attention" for each in are_recurrent[:num_layers]]
