"""Qwen3.5 (Qwen team 2026): Qwen3-Next's layers with an MLP, or with experts; pictures and video as in Qwen3-VL, or its text
model alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Family
from engine.checkpoint.families.qwen3_next import Qwen3Next
from engine.checkpoint.families.qwen3_vl import Qwen3VL
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import VisionConfig, VisionSpec, read_media_tokens, read_pixel_scale, read_vision


class Qwen3_5(Qwen3Next):
    name = "qwen3_5_text"
    class_names: tuple[str, ...] = ("Qwen3_5ForCausalLM",)
    num_kv_heads = 4
    is_recurrence_stored_by_key_head = False
    harmless_options = frozenset(("mrope_section", "mrope_interleaved"))  # without pictures, all three positions are equal
    unused_tensors = r"^(model\.)?visual\."

    def num_draft_layers(self, options: JsonOptions) -> int:
        return options.count("mtp_num_hidden_layers", Family.num_draft_layers(self, options), least=0, most=64)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return None


class Qwen3_5Moe(Qwen3_5):
    name = "qwen3_5_moe_text"
    class_names = ("Qwen3_5MoeForCausalLM",)
    num_kv_heads = 2
    mlp_width_name = "moe_intermediate_size"  # there are no other MLPs

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        return {"moe_intermediate_size": 512}

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return all_experts(options, num_layers)


def all_experts(options: JsonOptions, num_layers: int) -> ExpertsConfig:
    """Read the experts, which all layers have."""
    count = num_experts(options, "num_experts", default=256)
    return ExpertsConfig(
        tuple(range(num_layers)),
        count,
        num_chosen(options, "num_experts_per_tok", 8, count),
        options.count("moe_intermediate_size", 512),
        options.count("shared_expert_intermediate_size", 512),
        has_shared_gate=True,
        is_normalized=True,
    )


class Qwen3_5VL(Qwen3_5):
    name = "qwen3_5"
    class_names = ("Qwen3_5ForConditionalGeneration",)
    outer_ties_word_embeddings = False
    mrope_layout = "interleaved"
    media = Qwen3VL.media
    unused_tensors = ""

    def mrope_sections(self, text: JsonOptions, rope: JsonOptions, num_pairs: int) -> tuple[int, ...]:
        return rope.counts("mrope_section", (11, 11, 10))

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        vision = options.within("vision_config")
        return read_vision(
            self.name,
            vision,
            read_media_tokens(options, text.count("vocab_size"), "vision_start_token_id", "vision_end_token_id"),
            read_pixel_scale(options.path.parent),
            VisionSpec(
                activation="gelu_pytorch_tanh",
                patch_size=16,
                out_hidden_size=vision.count("out_hidden_size"),
                temporal_patch_size=vision.count("temporal_patch_size", 2),
                num_positions=vision.count("num_position_embeddings", 2304),
            ),
        )


class Qwen3_5MoeVL(Qwen3_5VL):
    name = "qwen3_5_moe"
    class_names = ("Qwen3_5MoeForConditionalGeneration",)
    num_kv_heads = 2
    mlp_width_name = "moe_intermediate_size"

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        return {"moe_intermediate_size": 512}

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return all_experts(options, num_layers)
