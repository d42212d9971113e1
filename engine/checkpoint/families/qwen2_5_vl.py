"""Qwen2.5-VL (Bai et al. 2025): Qwen2 with vision; most layers of its encoder attend within windows."""

from __future__ import annotations

from engine.checkpoint.families.family import Biases
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.families.qwen2 import Qwen2
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import (
    VisionConfig,
    VisionSpec,
    layer_list,
    read_media_tokens,
    read_pixel_scale,
    read_vision,
)


class Qwen2_5VL(Qwen2):
    name = "qwen2_5_vl"
    class_names: tuple[str, ...] = ("Qwen2_5_VLForConditionalGeneration",)
    num_kv_heads = 8
    mrope_layout = "sections"
    media = MediaRules(
        encoder="workers.encoders.qwen2_5_vl:Qwen2_5VL",
        clip_pixels=(128 * 28 * 28, 28 * 28 * 768),
        max_video_tokens=128_000,
        frame_spacing="whole rows",
        has_times_in_positions=True,
    )
    rms_norm_eps = 1e-5
    rope_theta = 1_000_000.0
    max_window_layers = 80

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(True, False, False)

    def mrope_sections(self, text: JsonOptions, rope: JsonOptions, num_pairs: int) -> tuple[int, ...]:
        return rope.counts("mrope_section", (16, 24, 24))

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        vision = options.within("vision_config")
        return read_vision(
            self.name,
            vision,
            read_media_tokens(options, text.count("vocab_size"), "vision_start_token_id", "vision_end_token_id"),
            read_pixel_scale(options.path.parent),
            VisionSpec(
                activation="silu",
                out_hidden_size=vision.count("out_hidden_size"),
                temporal_patch_size=vision.count("temporal_patch_size", 2),
                tokens_per_second=vision.count("tokens_per_second", 4),
                window_size=vision.count("window_size", 112),
                full_attention_layers=layer_list(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
            ),
        )
