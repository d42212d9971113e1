"""Gemma 3 with pictures (Google 2025): the text model of Gemma 3, and SigLIP (Zhai et al. 2023) for squares of one size. Tokens
of a picture attend to all of it."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from engine.checkpoint.families.gemma3 import Gemma3
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import MediaTokens, VisionConfig, VisionSpec, read_pixel_scale, read_vision

_SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


class Gemma3Vision(Gemma3):
    name = "gemma3"
    class_names = ("Gemma3ForConditionalGeneration",)
    outer_ties_word_embeddings = True
    gguf_name = None
    caps_logits = False  # transformers caps those of the text model alone
    harmless_options = Gemma3.harmless_options | {"vision_use_head"}
    media = MediaRules(
        encoder="workers.encoders.siglip:SiglipPooled",
        sizing="square",
        resample=2,
        text_around="\n\n",
    )

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        return _TEXT_DEFAULTS

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        vision = options.within("vision_config").with_defaults(_SIGLIP_DEFAULTS)
        vision.check_supported({"model_type": "siglip_vision_model"})
        image_size, patch_size = vision.count("image_size"), vision.count("patch_size")
        side = image_size // patch_size
        if side * patch_size != image_size:
            raise vision.error("image_size", f"{image_size} should be a multiple of patch_size, {patch_size}")
        num_tokens = options.count("mm_tokens_per_image", 256)
        token_side = isqrt(num_tokens)
        if token_side**2 != num_tokens or side % token_side:
            raise options.error(
                "mm_tokens_per_image", f"{num_tokens} should be the square of a divisor of the {side} patches of a side"
            )
        return read_vision(
            self.name,
            vision.replaced({"spatial_merge_size": side // token_side}),
            self._tokens(options, text.count("vocab_size")),
            read_pixel_scale(options.path.parent),
            VisionSpec(
                activation="gelu_pytorch_tanh",
                out_hidden_size=text.count("hidden_size"),
                temporal_patch_size=1,
                norm_eps=vision.number("layer_norm_eps", 1e-6, least=0),
                num_positions=side * side,
                has_rotary=False,
                sees_whole_units=True,
            ),
        )

    @staticmethod
    def _tokens(options: JsonOptions, vocab_size: int) -> MediaTokens:
        def token_id(kind: str, default: int) -> int:
            name = f"{kind}_token_id" if options.values.get(f"{kind}_token_id") is not None else f"{kind}_token_index"
            return options.count(name, default, least=0, most=vocab_size - 1)

        start, end = token_id("boi", 255_999), token_id("eoi", 256_000)
        return MediaTokens(token_id("image", 262_144), -1, start, end, start, end)
