"""Gemma 4 with pictures (Google 2026): the text model of Gemma 4, and an encoder for pictures of any aspect ratio. In larger
models tokens of a picture attend to all of it, in layers with a window. Sound and video are not read."""

from __future__ import annotations

from engine.checkpoint.families.gemma4 import Gemma4
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import MediaTokens, PixelScale, VisionConfig, VisionSpec, read_pixel_scale, read_vision

_VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "patch_size": 16,
    "rope_theta": 100.0,
}
_TEXT_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_TOKENS = {"image": 258_880, "video": 258_884, "audio": 258_881}


class Gemma4Vision(Gemma4):
    name = "gemma4"
    class_names = ("Gemma4ForConditionalGeneration",)
    outer_ties_word_embeddings = True
    gguf_name = None
    harmless_options = Gemma4.harmless_options | {
        *("audio_config", "vision_soft_tokens_per_image"),
        *("default_output_length", "global_head_dim", "max_position_embeddings"),  # of vision_config
    }
    media = MediaRules(
        encoder="workers.encoders.gemma4:Gemma4Tower",
        picture_pixels=(1, 280 * 48 * 48),
        clip_pixels=(1, 280 * 48 * 48),
        sizing="budget",
        adds_markers=True,
    )

    def text_defaults(self, text: JsonOptions) -> dict[str, int]:
        return _TEXT_DEFAULTS

    def same_inputs(self, options: JsonOptions, text: JsonOptions) -> tuple[tuple[int, int], ...]:
        padding = text.count("pad_token_id", 0, least=0, most=text.count("vocab_size") - 1)
        ids = [options.count(f"{kind}_token_id", default, least=0) for kind, default in _TOKENS.items()]
        return tuple((token_id, padding) for token_id in ids if token_id < text.count("vocab_size"))

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig | None:
        if options.values.get("vision_config") is None:
            return None
        vision = options.within("vision_config").with_defaults(_VISION_DEFAULTS)
        vision.check_supported({"model_type": "gemma4_vision"})
        vision = vision.replaced(
            {
                "hidden_act": vision.text("hidden_activation", "gelu_pytorch_tanh"),
                "spatial_merge_size": vision.count("pooling_kernel_size", 3),
            }
        )
        return read_vision(
            self.name,
            vision,
            self._tokens(options, text.count("vocab_size")),
            self._pixel_scale(options),
            VisionSpec(
                activation="gelu_pytorch_tanh",
                out_hidden_size=text.count("hidden_size"),
                num_kv_heads=vision.count("num_key_value_heads", 12),
                head_dim=vision.count("head_dim", 64),
                temporal_patch_size=1,
                norm_eps=vision.number("rms_norm_eps", 1e-6, least=0),
                num_places=vision.count("position_embedding_size", 10_240),
                rotates_halves=True,
                has_limits=vision.flag("use_clipped_linears", False),
                is_standardized=vision.flag("standardize", False),
                sees_whole_units=self.sees_pictures_whole(text),
            ),
        )

    @staticmethod
    def _pixel_scale(options: JsonOptions) -> PixelScale:
        """Return the scale of the processor, and then the encoder's own: 2 * (pixel - 0.5)."""
        found = read_pixel_scale(options.path.parent, is_optional=True)
        pairs = list(zip(found.means, found.deviations, strict=True))
        return PixelScale(
            found.factor,
            tuple(mean + 0.5 * deviation for mean, deviation in pairs),
            tuple(0.5 * deviation for _, deviation in pairs),
        )

    @staticmethod
    def _tokens(options: JsonOptions, vocab_size: int) -> MediaTokens:
        def token_id(kind: str, default: int) -> int:
            return options.count(f"{kind}_token_id", default, least=0, most=vocab_size - 1)

        start, end = token_id("boi", 255_999), token_id("eoi", 258_882)
        return MediaTokens(token_id("image", _TOKENS["image"]), -1, start, end, start, end)
