"""PaddleOCR-VL (Baidu 2025): a dense ERNIE 4.5, its rotary pairs in halves, that reads pages; a SigLIP encoder (Zhai et al.
2023) with rotary positions. It takes no video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.families.ernie4_5 import Ernie4_5
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import VisionConfig, VisionSpec, read_media_tokens, read_pixel_scale, read_vision


class PaddleOcrVL(Ernie4_5):
    name = "paddleocr_vl"
    class_names = ("PaddleOCRVLForConditionalGeneration",)
    outer_ties_word_embeddings = True
    is_rotary_interleaved = False
    draft_names = None
    mrope_layout = "sections"
    media = MediaRules(
        encoder="workers.encoders.paddleocr_vl:PaddleOcrVL",
        picture_pixels=(384 * 384, 1536 * 1536),
        clip_pixels=(384 * 384, 1536 * 1536),
        sizing="widened area",
    )
    head_dim = 128

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        return {"tie_word_embeddings": True}

    def mrope_sections(self, text: JsonOptions, rope: JsonOptions, num_pairs: int) -> tuple[int, ...]:
        return rope.counts("mrope_section", (16, 24, 24))

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        vision = options.within("vision_config")
        tokens = read_media_tokens(
            options, text.count("vocab_size"), "vision_start_token_id", "vision_end_token_id", takes_video=False
        )
        side = vision.count("image_size", 384) // vision.count("patch_size", 14)
        return read_vision(
            self.name,
            vision,
            tokens,
            read_pixel_scale(options.path.parent),
            VisionSpec(
                activation="gelu_pytorch_tanh",
                out_hidden_size=text.count("hidden_size"),
                temporal_patch_size=1,  # its files say 2, but its encoder has no temporal dimension
                norm_eps=vision.number("layer_norm_eps", 1e-6, least=0),
                num_positions=side * side,
            ),
        )
