"""Mistral Small 3.1 and Pixtral (Mistral AI 2024, 2025): Mistral or Ministral 3 with pictures of any size. A token is between
two rows of a picture's tokens, and another one after the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.activations import read_activation
from engine.checkpoint.families.family import Biases, QueryScaling
from engine.checkpoint.families.llama import Llama
from engine.checkpoint.families.media_names import named_token_ids
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.families.ministral3 import Ministral3
from engine.checkpoint.families.mistral import Mistral
from engine.checkpoint.json_fields import JsonOptions, read_json
from engine.checkpoint.processor_files import PROCESSOR
from engine.checkpoint.vision_config import MediaTokens, VisionConfig, VisionSpec, read_pixel_scale, read_vision

_VISION_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {  # files of older versions leave them out
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
    },
    "ministral3": {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": Ministral3.rms_norm_eps,
        "head_dim": Ministral3.head_dim,
        "sliding_window": 0,
    },
}
_NAMES = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


class Mistral3(Mistral):
    name = "mistral3"
    class_names = ("Mistral3ForConditionalGeneration",)
    outer_ties_word_embeddings: bool | None = True
    harmless_options = Ministral3.harmless_options | {
        "image_size",
        "vision_feature_select_strategy",
        "vocab_size",
    }  # the last of vision_config
    text_kinds: tuple[str, ...] = ("mistral", "ministral3")  # model types of the text model; the first is the default
    default_image_token = 10
    merge_size = 2  # default
    default_feature_layer = -1
    has_projector_bias = False  # default
    media = MediaRules(encoder="workers.encoders.pixtral:MergedPixtral", picture_pixels=(1, 1024 * 1024), sizing="edge")

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        kind = text.text("model_type", self.text_kinds[0])
        if kind not in self.text_kinds:
            raise text.error("model_type", f"{kind!r} is not supported; expected one of {', '.join(self.text_kinds)}")
        found = dict(_TEXT_DEFAULTS[kind])
        if kind == "llama":
            found["num_key_value_heads"] = text.count("num_attention_heads", found["num_attention_heads"])
        elif kind == "ministral3" and not (text.values.get("rope_parameters") or text.values.get("rope_scaling")):
            found["rope_parameters"] = dict(Ministral3.default_rope)
        return found

    def query_scaling(self, options: JsonOptions, rope: JsonOptions, *, is_rotated: bool) -> QueryScaling | None:
        is_scaled = options.text("model_type", "mistral") == "ministral3"
        return Ministral3.query_scaling(_MINISTRAL, options, rope, is_rotated=is_rotated) if is_scaled else None

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        patches = {} if options.values.get("vision_config") else {"patch_size": 14}
        vision = options.within("vision_config").with_defaults(_VISION_DEFAULTS | patches)
        vision.check_supported({"model_type": "pixtral"})
        head_dim = vision.count("hidden_size") // vision.count("num_attention_heads")
        vision.check_supported({"head_dim": head_dim})
        self.check_features(options)
        depth = vision.count("num_hidden_layers")
        num_layers = self.num_feature_layers(options, depth)
        merge_size = options.count("spatial_merge_size", self.merge_size)
        return read_vision(
            self.name,
            vision.replaced({"spatial_merge_size": merge_size, "num_hidden_layers": num_layers}),
            self._tokens(options, text.count("vocab_size"), vision.count("patch_size"), merge_size),
            read_pixel_scale(options.path.parent),
            VisionSpec(
                activation="gelu",
                out_hidden_size=text.count("hidden_size"),
                num_unused_layers=depth - num_layers,
                temporal_patch_size=1,
                text_norm_eps=text.number("rms_norm_eps", self.rms_norm_eps, least=0),
                has_alternating_frequencies=True,
                projector_activation=read_activation(options, "projector_hidden_act", "gelu"),
                has_projector_bias=options.flag("multimodal_projector_bias", self.has_projector_bias),
            ),
        )

    @staticmethod
    def check_features(options: JsonOptions) -> None:
        """Raise CheckpointError if other features than those of all patches are wanted."""

    def num_feature_layers(self, options: JsonOptions, depth: int) -> int:
        """Return how many layers of the encoder there are before the features."""
        layer = options.values.get("vision_feature_layer")
        if layer is None:
            layer = self.default_feature_layer
        if isinstance(layer, list) and len(layer) == 1:
            layer = layer[0]
        count = layer + (depth + 1 if layer < 0 else 0) if type(layer) is int else 0
        if not 0 < count <= depth:
            raise options.error(
                "vision_feature_layer",
                f"{layer!r} is not supported; expected one layer, 1 to {depth} or -{depth} to -1, the last",
            )
        return count

    def _tokens(self, options: JsonOptions, vocab_size: int, patch_size: int, merge_size: int) -> MediaTokens:
        directory = options.path.parent
        name = "image_token_id" if options.values.get("image_token_id") is not None else "image_token_index"
        path = directory / PROCESSOR
        processor = JsonOptions(read_json(path) if path.is_file() else {}, path)
        processor.check_supported({"patch_size": patch_size, "spatial_merge_size": merge_size})
        names = [processor.text(key, default) for key, default in _NAMES.items()]
        row_break, end = named_token_ids(directory, names, vocab_size)
        image = options.count(name, self.default_image_token, least=0, most=vocab_size - 1)
        return MediaTokens(image, -1, -1, end, -1, end, row_break)


class Pixtral(Mistral3):
    """The same without merged patches, as Llava files say it."""

    name = "llava"
    class_names = ("LlavaForConditionalGeneration",)
    outer_ties_word_embeddings = None
    harmless_options = Mistral3.harmless_options | {"image_seq_length"}  # the number of tokens is that of patches
    text_kinds = ("llama", "mistral", "ministral3")
    default_image_token = 32_000
    merge_size = 1
    default_feature_layer = -2
    has_projector_bias = True
    media = MediaRules(encoder="workers.encoders.pixtral:Pixtral", picture_pixels=(1, 1024 * 1024), sizing="edge")

    def biases(self, options: JsonOptions) -> Biases:
        return _LLAMA.biases(options) if self.is_llama(options) else super().biases(options)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        return (0,) * num_layers if self.is_llama(options) else super().sliding_windows(options, num_layers)

    def is_llama(self, text: JsonOptions) -> bool:
        return text.text("model_type", self.text_kinds[0]) == "llama"

    @staticmethod
    def check_features(options: JsonOptions) -> None:
        options.check_supported({"vision_feature_select_strategy": "full", "spatial_merge_size": 1})
        if options.values.get("vision_feature_select_strategy") is None:
            raise options.error("vision_feature_select_strategy", "the default, 'default', is not supported; expected 'full'")
        options.within("vision_config").check_supported({"model_type": "pixtral"})
        if options.within("vision_config").values.get("model_type") is None:
            raise options.error("vision_config.model_type", "is missing; expected 'pixtral'")


_LLAMA = Llama()
_MINISTRAL = Ministral3()
