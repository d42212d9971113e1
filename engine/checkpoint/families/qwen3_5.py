"""Qwen3.5 (Qwen team 2026): Qwen3-Next's layers with an MLP, or with experts; pictures and video as in Qwen3-VL, or its text
model alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Family
from engine.checkpoint.families.qwen3_next import Qwen3Next
from engine.checkpoint.families.qwen3_vl import Qwen3VL, read_encoder
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import VisionConfig


class Qwen3_5(Qwen3Next):
    name = "qwen3_5_text"
    gguf_name = None
    gguf_names_with_pictures: tuple[str, ...] = ("qwen35",)
    has_tiled_heads_in_gguf = True
    class_names: tuple[str, ...] = ("Qwen3_5ForCausalLM",)
    num_kv_heads = 4
    has_joined_inputs = False
    # without pictures, all three positions are equal; states are float32 in any case
    harmless_options = frozenset(("mrope_section", "mrope_interleaved", "mamba_ssm_dtype"))
    unused_tensors = r"^(model\.)?visual\."

    def num_draft_layers(self, options: JsonOptions) -> int:
        return options.count("mtp_num_hidden_layers", Family.num_draft_layers(self, options), least=0, most=64)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return None


class Qwen3_5Moe(Qwen3_5):
    name = "qwen3_5_moe_text"
    gguf_names_with_pictures = ("qwen35moe",)
    class_names = ("Qwen3_5MoeForCausalLM",)
    num_kv_heads = 2
    mlp_width_name = "moe_intermediate_size"  # there are no other MLPs

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        return super().of_gguf(options, num_layers) | {"intermediate_size": None}

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        return {"moe_intermediate_size": 512}

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
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
        return read_encoder(self.name, options, text)


class Qwen3_5MoeVL(Qwen3_5Moe, Qwen3_5VL):
    name = "qwen3_5_moe"
    class_names = ("Qwen3_5MoeForConditionalGeneration",)
