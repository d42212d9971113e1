"""Qwen3-VL (Qwen team 2025): Qwen3 with vision; outputs of inner encoder layers are added in the text model's first layers."""

from __future__ import annotations

from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.families.qwen3 import Qwen3
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import (
    VisionConfig,
    VisionSpec,
    layer_list,
    read_media_tokens,
    read_pixel_scale,
    read_vision,
)


class Qwen3VL(Qwen3):
    name = "qwen3_vl"
    class_names: tuple[str, ...] = ("Qwen3VLForConditionalGeneration",)
    outer_ties_word_embeddings = False
    draft_names = None
    mrope_layout = "interleaved"
    media = MediaRules(
        encoder="workers.encoders.qwen3_vl:Qwen3VL",
        clip_pixels=(128 * 32 * 32, 32 * 32 * 768),
        max_video_tokens=768,
        shares_clip_pixels=True,
        frame_spacing="even",
        has_times_in_text=True,
    )
    rope_theta = 500_000.0

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return (0,) * num_layers

    def mrope_sections(self, text: JsonOptions, rope: JsonOptions, num_pairs: int) -> tuple[int, ...]:
        return rope.counts("mrope_section", (24, 20, 20))

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        vision = options.within("vision_config")
        deepstack_layers = layer_list(vision, "deepstack_visual_indexes", (8, 16, 24))
        num_layers = text.count("num_hidden_layers")
        if len(deepstack_layers) > num_layers:
            raise vision.error(
                "deepstack_visual_indexes",
                f"{list(deepstack_layers)} has more entries than the text model has layers, {num_layers}",
            )
        return read_encoder(self.name, options, text, deepstack_layers)


def read_encoder(kind: str, options: JsonOptions, text: JsonOptions, deepstack_layers: tuple[int, ...] = ()) -> VisionConfig:
    """Read Qwen3-VL's encoder. `deepstack_layers`: those with outputs that are added in the text model."""
    vision = options.within("vision_config")
    return read_vision(
        kind,
        vision,
        read_media_tokens(options, text.count("vocab_size"), "vision_start_token_id", "vision_end_token_id"),
        read_pixel_scale(options.path.parent),
        VisionSpec(
            activation="gelu_pytorch_tanh",
            patch_size=16,
            out_hidden_size=vision.count("out_hidden_size"),
            temporal_patch_size=vision.count("temporal_patch_size", 2),
            num_positions=vision.count("num_position_embeddings", 2304),
            deepstack_layers=deepstack_layers,
        ),
    )
