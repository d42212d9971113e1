"""ERNIE 4.5 VL (Baidu 2025): ERNIE 4.5 with experts and vision; media tokens have their own experts.

Reads transformers' files (`text_config`) and Baidu's own, which are flat and have other names.
"""

from __future__ import annotations

from engine.checkpoint.families.ernie4_5 import Ernie4_5
from engine.checkpoint.families.ernie4_5_moe import Ernie4_5Moe
from engine.checkpoint.families.experts import ExpertsConfig, num_chosen
from engine.checkpoint.families.family import Biases
from engine.checkpoint.families.media_names import named_token_ids
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import (
    MediaTokens,
    VisionConfig,
    VisionSpec,
    read_media_tokens,
    read_pixel_scale,
    read_vision,
)

_CORRECTION = "mlp.moe_statics.e_score_correction_bias"
_VIDEO_TOKENS = {"video_start_token_id": 101_306, "video_end_token_id": 101_307}
_TOKEN_NAMES = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>")


class Ernie4_5VLMoe(Ernie4_5Moe):
    name = "ernie4_5_vl_moe"
    gguf_name = ""
    other_names = ("ernie4_5_moe_vl",)
    class_names = ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration")
    outer_ties_word_embeddings = True
    model = "workers.models.ernie4_5_vl_moe:Ernie4_5VLMoe"
    draft_names = None
    mrope_layout = "ernie"
    media = MediaRules(
        encoder="workers.encoders.ernie4_5_vl_moe:Ernie4_5VLMoe",
        picture_pixels=(56 * 56, 28 * 28 * 6177),
        clip_pixels=(299 * 28 * 28, 1196 * 28 * 28),
        num_frames=(16, 180),
        draws_times=True,
    )

    def biases(self, options: JsonOptions) -> Biases:
        return Ernie4_5.biases(self, options)

    def mrope_sections(self, text: JsonOptions, rope: JsonOptions, num_pairs: int) -> tuple[int, ...]:
        kind = rope.text("rope_type", rope.text("type", "default"))
        if kind not in ("default", "mrope"):
            raise rope.error("rope_type", f"{kind!r} is not supported for {self.name}; expected 'default'")
        for_time = text.count("freq_allocation", 20, least=0)
        in_turns = (num_pairs - for_time) // 2
        return rope.counts("mrope_section", (in_turns, in_turns, for_time))

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig:
        vision = options.within("vision_config")
        hidden_size = vision.count("hidden_size", vision.count("embed_dim", 1280))
        for name, given in (("embed_dim", vision), ("pixel_hidden_size", options)):
            if given.count(name, hidden_size) != hidden_size:
                raise given.error(name, f"{given.count(name)} differs from the encoder's hidden_size, {hidden_size}")
        temporal_merge_size = vision.count("temporal_merge_size", options.count("temporal_conv_size", 2))
        if temporal_merge_size != 2:
            raise vision.error("temporal_merge_size", f"{temporal_merge_size} is not supported; expected 2")
        merge_size = vision.count("spatial_merge_size", 2)
        if options.count("spatial_conv_size", merge_size) != merge_size:
            raise options.error("spatial_conv_size", f"differs from vision_config.spatial_merge_size, {merge_size}")
        return read_vision(
            self.name,
            vision,
            self._tokens(options, text.count("vocab_size")),
            read_pixel_scale(options.path.parent),
            VisionSpec(
                activation="quick_gelu",
                out_hidden_size=text.count("hidden_size"),
                temporal_patch_size=1,
                text_norm_eps=text.number("rms_norm_eps", self.rms_norm_eps, least=0),
                intermediate_size=round(hidden_size * vision.number("mlp_ratio", 5120 / hidden_size)),
                temporal_merge_size=temporal_merge_size,
                norm_eps=vision.number("rms_norm_eps", 1e-6, least=0),
            ),
        )

    def _tokens(self, options: JsonOptions, vocab_size: int) -> MediaTokens:
        """Read the media tokens. Baidu's files have one placeholder for both media, and the ids around it are in the
        tokenizer's files."""
        if options.values.get("im_patch_id") is None:
            defaults = {name: token_id for name, token_id in _VIDEO_TOKENS.items() if token_id < vocab_size}
            given = options.with_defaults(defaults)
            return read_media_tokens(given, vocab_size, "image_start_token_id", "image_end_token_id")
        placeholder = options.count("im_patch_id", least=0, most=vocab_size - 1)
        start, end, video_start, video_end = named_token_ids(options.path.parent, _TOKEN_NAMES, vocab_size)
        return MediaTokens(placeholder, placeholder, start, end, video_start, video_end)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return self._set_of(options, num_layers, 0)

    def vision_experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        return self._set_of(options, num_layers, 1)

    def _set_of(self, options: JsonOptions, num_layers: int, index: int) -> ExpertsConfig | None:
        """Return the experts of text (0) or of media (1): both have the same number, in the same layers."""
        self.check_followed(options)
        counts = options.counts("moe_num_experts", (64, 64), or_one=2)
        sizes = options.counts("moe_intermediate_size", (1536, 512))
        if len(counts) != 2 or len(sizes) != 2 or counts[0] != counts[1]:
            raise options.error(
                "moe_num_experts", f"{list(counts)} of sizes {list(sizes)}: should be 2 sets with the same number of experts"
            )
        sparse = self._sparse_layers(options, num_layers)
        if not counts[0]:
            return None
        return ExpertsConfig(
            sparse,
            counts[0],
            num_chosen(options, "moe_k", 6, counts[0]),
            sizes[index],
            options.count("moe_num_shared_experts", 2, least=0) * sizes[0] if index == 0 else 0,
            correction=_CORRECTION if options.flag("moe_use_aux_free", True) else "",
            correction_shape=(2, counts[0]),
            is_normalized=True,
            smallest_sum=options.number("moe_norm_min", 1e-12),
        )

    def _sparse_layers(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        kinds = options.texts("mlp_layer_types")
        if kinds:
            if len(kinds) != num_layers or {*kinds} - {"dense", "sparse"}:
                raise options.error(
                    "mlp_layer_types", f"{list(kinds)} should be {num_layers} entries, each 'dense' or 'sparse'"
                )
            return tuple(index for index, kind in enumerate(kinds) if kind == "sparse")
        starts = options.counts("moe_layer_start_index", (1, 1), or_one=2)
        last = num_layers - 1
        ends = [last if end == -1 else min(end, last) for end in options.counts("moe_layer_end_index", (last, last), or_one=2)]
        if {*starts} != {starts[0]} or {*ends} != {ends[0]}:
            raise options.error(
                "moe_layer_end_index", f"layers {list(starts)} to {ends}: text and media should have experts in the same layers"
            )
        interval = options.count("moe_layer_interval", 1)
        return tuple(index for index in range(num_layers) if starts[0] <= index <= ends[0] and (index + 1) % interval == 0)
