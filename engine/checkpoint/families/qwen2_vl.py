"""Qwen2-VL (Wang et al. 2024): Qwen2 with vision; its encoder has LayerNorms and MLPs without a gate."""

from __future__ import annotations

from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.families.qwen2_5_vl import Qwen2_5VL
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import VisionConfig, VisionSpec, read_media_tokens, read_pixel_scale, read_vision

_MAX_RATIO = 1024.0  # of the MLP to the width; bounds what is reserved before weights are read


class Qwen2VL(Qwen2_5VL):
    name = "qwen2_vl"
    class_names = ("Qwen2VLForConditionalGeneration",)
    media = MediaRules(
        encoder="workers.encoders.qwen2_vl:Qwen2VL",
        clip_pixels=(128 * 28 * 28, 28 * 28 * 768),
        max_video_tokens=128_000,
        frame_spacing="whole rows",
    )

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        """Read the encoder. Its width is `embed_dim`; `hidden_size` is that of the text model."""
        given = options.within("vision_config")
        width, out_width = given.count("embed_dim", 1280), given.count("hidden_size", 3584)
        ratio = given.number("mlp_ratio", 4.0, above=0, most=_MAX_RATIO)
        sizes = {"hidden_size": width, "intermediate_size": int(width * ratio)}
        vision = given.replaced(sizes)
        return read_vision(
            self.name,
            vision,
            read_media_tokens(options, text.count("vocab_size"), "vision_start_token_id", "vision_end_token_id"),
            read_pixel_scale(options.path.parent),
            VisionSpec(
                activation="quick_gelu",
                out_hidden_size=out_width,
                temporal_patch_size=vision.count("temporal_patch_size", 2),
            ),
        )
