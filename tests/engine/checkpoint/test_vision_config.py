"""config.json of vision models, nested and flat, and every refused value."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.mrope import pair_axes
from engine.checkpoint.vision_config import MediaTokens, PixelScale
from engine.errors import CheckpointError
from tests.paths import GOLDEN

PROCESSOR = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.5, 1], "rescale_factor": 0.00390625}
TEXT: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "torch_dtype": "bfloat16",
}
TOWER: dict[str, Any] = {
    "depth": 9,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "out_hidden_size": 64,
    "in_chans": 3,
    "fullatt_block_indexes": [2, 8],
}
TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
QWEN2_5: dict[str, Any] = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **TEXT, **TOKENS, "vision_config": TOWER}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    **TOKENS,
    "text_config": {
        **TEXT,
        "head_dim": 16,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
    },
    "vision_config": {**TOWER, "num_position_embeddings": 81, "deepstack_visual_indexes": [1, 5]},
}
ERNIE: dict[str, Any] = {  # Baidu's own
    "model_type": "ernie4_5_moe_vl",
    **{name: value for name, value in TEXT.items() if name != "rope_scaling"},
    "freq_allocation": 2,
    "im_patch_id": 7,
    "moe_num_experts": [8, 8],
    "moe_intermediate_size": [48, 32],
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [29, 28],
    "moe_k": 2,
    "pixel_hidden_size": 32,
    "spatial_conv_size": 2,
    "temporal_conv_size": 2,
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 4},
}
OCR: dict[str, Any] = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    **TEXT,
    "head_dim": 16,
    **TOKENS,
    "vision_config": {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "num_channels": 3,
        "image_size": 384,
        "temporal_patch_size": 2,
    },
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6},
    "image_token_index": 5,
    "boi_token_index": 3,
    "eoi_token_index": 4,
    "mm_tokens_per_image": 9,
    "vision_config": {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "image_size": 96, "patch_size": 8},
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 16},
    "image_token_id": 5,
    "boi_token_id": 3,
    "eoi_token_id": 4,
    "vision_config": {
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default"}},
        **{"dtype": "bfloat16", "default_output_length": 280, "global_head_dim": 64},  # without effect
    },
    "audio_config": {"model_type": "gemma4_audio"},
}
GEMMA4["text_config"] |= {"hidden_size_per_layer_input": 0, "pad_token_id": 7}
MISTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {"model_type": "ministral3", **{name: TEXT[name] for name in TEXT if not name.startswith("rope")}},
    "image_token_index": 5,
    "vision_feature_layer": -1,
    "vision_config": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3, "head_dim": 16},
}


def read(directory: Path, config: dict[str, Any], processor: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR if processor is None else processor))
    names = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>", "[IMG_BREAK]", "[IMG_END]")
    tokens = {str(300 + index): {"content": name} for index, name in enumerate(names)}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    return ModelConfig.read(directory)


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the configuration with the option at `path` set, or removed if the value is `...`."""
    config = deepcopy(config)
    *outer, name = path.split(".")
    inner = config
    for part in outer:
        inner = inner[part]
    inner[name] = value
    if value is ...:
        del inner[name]
    return config


def test_golden() -> None:
    qwen2_5, qwen3, ernie = (ModelConfig.read(GOLDEN / name) for name in ("qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe"))
    assert qwen2_5.vision
    assert qwen3.vision
    assert ernie.vision
    assert qwen2_5.vision.tokens == qwen3.vision.tokens == ernie.vision.tokens == MediaTokens(5, 6, 3, 4, 3, 4)
    assert (qwen2_5.vision.window_size, qwen2_5.vision.full_attention_layers) == (112, (1, 3))
    assert qwen2_5.vision.tokens_per_second == 2
    assert (qwen3.vision.position_table_side, qwen3.vision.deepstack_layers) == (8, (0, 1))
    assert [config.vision.feature_width for config in (qwen2_5, qwen3, ernie) if config.vision] == [64, 192, 64]
    assert [config.vision.frames_per_unit for config in (qwen2_5, qwen3, ernie) if config.vision] == [2, 2, 2]
    assert [config.vision.num_tokens_of(6, 8) for config in (qwen2_5, qwen3, ernie) if config.vision] == [12, 12, 12]
    assert qwen3.vision.pixels == PixelScale(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert (qwen2_5.tie_word_embeddings, qwen3.tie_word_embeddings, ernie.tie_word_embeddings) == (False, True, True)
    assert (qwen2_5.has_qkv_bias, qwen3.has_qkv_bias, ernie.rope.is_interleaved) == (True, False, True)
    assert qwen2_5.rope.pair_axes() == (0, 0, 1, 1, 1, 2, 2, 2)
    assert qwen3.rope.pair_axes() == (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0)
    assert ernie.rope.pair_axes() == (1, 2, 1, 2, 1, 2, 0, 0)
    assert ernie.experts
    assert ernie.vision_experts
    assert (ernie.experts.sparse_layers, ernie.experts.num_experts, ernie.experts.correction_shape) == ((1, 2), 8, (2, 8))
    assert [each.intermediate_size for each in (ernie.experts, ernie.vision_experts)] == [48, 32]
    assert [each.shared_intermediate_size for each in (ernie.experts, ernie.vision_experts)] == [48, 0]
    text = ModelConfig.read(GOLDEN / "qwen3")
    assert (text.vision, text.vision_experts, text.rope.pair_axes()) == (None, None, ())


@pytest.mark.parametrize("config", [QWEN2_5, QWEN3, ERNIE, OCR, GEMMA, MISTRAL])
def test_travels_between_processes(config: dict[str, Any], tmp_path: Path) -> None:
    model = read(tmp_path, config)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ModelConfig) == model
    assert model.vision
    assert model.vision.pixels == PixelScale(1 / 256, (0.5, 0.25, 0.125), (0.5, 0.5, 1.0))


def test_flat_and_nested_are_the_same(tmp_path: Path) -> None:
    """qwen2_5_vl and paddleocr_vl are published flat; transformers 5 writes them nested."""
    for config in (QWEN2_5, OCR):
        nested = {name: value for name, value in config.items() if name not in {**TEXT, "head_dim": 0}}
        nested["text_config"] = {name: value for name, value in config.items() if name in {**TEXT, "head_dim": 0}}
        newer = deepcopy(nested)
        newer["text_config"]["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        del newer["text_config"]["rope_scaling"]
        assert read(tmp_path, config) == read(tmp_path, nested) == read(tmp_path, newer)
        assert read(tmp_path, config).dtype == "bfloat16"


def test_other_values_count(tmp_path: Path) -> None:
    """No value is assumed."""
    tower = {"patch_size": 8, "spatial_merge_size": 3, "temporal_patch_size": 4, "window_size": 64, "tokens_per_second": 7}
    more = {"num_heads": 4, "hidden_act": "gelu", "rope_parameters": {"rope_type": "axial", "rope_theta": 77.0}}
    vision = read(tmp_path, {**QWEN2_5, "vision_config": {**TOWER, **tower, **more}}).vision
    assert vision
    assert (vision.patch_size, vision.spatial_merge_size, vision.frames_per_unit, vision.window_size) == (8, 3, 4, 64)
    assert (vision.tokens_per_second, vision.num_heads, vision.head_dim) == (7, 4, 8)
    assert (vision.activation, vision.rope_theta, vision.merged_pixels) == ("gelu", 77.0, 24)
    assert vision.num_tokens_of(9, 12) == 12


def test_flat_ernie(tmp_path: Path) -> None:
    model = read(tmp_path, ERNIE)
    assert model.architecture == "ernie4_5_vl_moe"
    assert model.vision
    assert model.experts
    assert model.vision_experts
    assert model.vision.tokens == MediaTokens(7, 7, 300, 301, 302, 303)
    assert (model.vision.intermediate_size, model.vision.activation) == (128, "quick_gelu")
    assert (model.rope.mrope_sections, model.experts.sparse_layers) == ((3, 3, 2), (1, 2, 3))
    assert model.vision_experts.sparse_layers == (1, 2, 3)


def test_paddleocr(tmp_path: Path) -> None:
    model = read(tmp_path, OCR)
    assert model.vision
    assert (model.vision.position_table_side, model.vision.frames_per_unit, model.vision.video_token_id) == (27, 1, -1)
    assert (model.rope.is_interleaved, model.tie_word_embeddings) == (False, True)


def test_gemma3_leaves_out_defaults(tmp_path: Path) -> None:
    """The published 4B model has them in both objects."""
    found = read(tmp_path, GEMMA)
    assert (found.num_attention_heads, found.num_kv_heads, found.head_dim, found.max_position_embeddings) == (8, 4, 256, 131072)
    vision = found.vision
    assert vision is not None
    assert (vision.tokens, vision.depth, vision.spatial_merge_size) == (MediaTokens(5, -1, 3, 4, 3, 4), 12, 4)
    assert (vision.rope_theta, vision.square_side, vision.num_tokens_of(12, 12)) == (0.0, 96, 9)


def test_gemma4_pictures_have_any_aspect_ratio(tmp_path: Path) -> None:
    """Pixels become -1 to 1 after the processor's scale; tokens of pictures take the layers' embedding of padding."""
    found = read(tmp_path, GEMMA4, {})
    vision = found.vision
    assert vision is not None
    assert (vision.tokens, vision.spatial_merge_size, vision.num_kv_heads) == (MediaTokens(5, -1, 3, 4, 3, 4), 3, 2)
    assert (vision.rope_theta, vision.num_places, vision.head_dim) == (100.0, 10_240, 64)
    assert vision.pixels == PixelScale(1 / 255, (0.5,) * 3, (0.5,) * 3)
    assert (found.same_inputs, found.causal_layers, found.unknown_options) == (((5, 7),), (), {})
    whole = {**GEMMA4, "text_config": {**GEMMA4["text_config"], "use_bidirectional_attention": "vision"}}
    assert read(tmp_path, whole).causal_layers == (5,)
    assert read(tmp_path, {**GEMMA4, "vision_config": None}).vision is None


def test_mistral3_counts_tokens_between_rows(tmp_path: Path) -> None:
    found = read(tmp_path, MISTRAL)
    vision = found.vision
    assert vision is not None
    assert vision.tokens == MediaTokens(5, -1, -1, 305, -1, 305, 304)
    assert (vision.num_tokens_of(6, 8), vision.num_features_of(6, 8)) == (14, 12)
    assert (found.rope.rope_type, found.rms_norm_eps, set(found.sliding_windows)) == ("yarn", 1e-5, {0})


def test_processor_files(tmp_path: Path) -> None:
    """Newer checkpoints have one file for all processors, which takes precedence; disabled steps have no effect."""
    read(tmp_path, QWEN3)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing"):
        ModelConfig.read(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    vision = ModelConfig.read(tmp_path).vision
    assert vision
    assert vision.pixels == PixelScale(1 / 256, (0.5, 0.25, 0.125), (0.5, 0.5, 1.0))
    vision = read(tmp_path, QWEN3, {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}).vision
    assert vision
    assert vision.pixels.means == (0.5, 0.25, 0.125)
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "of older checkpoints"}))
    vision = read(tmp_path, QWEN3, {"do_normalize": False, "do_rescale": False}).vision
    assert vision
    assert vision.pixels == PixelScale(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    with pytest.raises(CheckpointError, match="should be 3 numbers each"):
        read(tmp_path, QWEN3, {"image_mean": [0.5]})


@pytest.mark.parametrize(
    ("config", "path", "value", "text"),
    [
        (QWEN2_5, "image_token_id", ..., "image_token_id: is missing"),
        (QWEN2_5, "video_token_id", None, "video_token_id: is missing"),
        (QWEN2_5, "vision_end_token_id", ..., "vision_end_token_id: is missing"),
        (QWEN2_5, "image_token_id", 400, "should be an integer of at most 399"),
        (QWEN2_5, "vision_config.out_hidden_size", 32, "should be the text model's hidden_size, 64"),
        (QWEN2_5, "vision_config.hidden_size", 33, "33 should be 2 heads of a multiple of 4"),
        (QWEN2_5, "vision_config.in_chans", 4, "4 is not supported"),
        (QWEN2_5, "vision_config.hidden_act", "elu", "'elu' is not supported; expected one of silu"),
        (QWEN2_5, "vision_config.window_size", 27, "less than the side of a token, 28"),
        (QWEN2_5, "vision_config.fullatt_block_indexes", [8, 2], "in ascending order, 0 to 8"),
        (QWEN2_5, "vision_config.fullatt_block_indexes", [9], "in ascending order, 0 to 8"),
        (QWEN2_5, "vision_config.fullatt_block_indexes", 7, "should be a list of layers"),
        (QWEN2_5, "vision_config.rope_parameters", {"rope_type": "yarn"}, "'yarn' is not supported; expected 'axial'"),
        (QWEN2_5, "vision_config.depth", ..., "depth: is missing"),
        (QWEN2_5, "vision_config.patch_size", 5000, "at most 1024"),
        (QWEN2_5, "rope_scaling.mrope_section", [2, 3, 4], "should be 3 numbers of rotary pairs with the sum 8"),
        (QWEN2_5, "rope_scaling.mrope_section", [4, 4], "should be 3 numbers of rotary pairs"),
        (QWEN2_5, "rope_scaling.mrope_section", "x", "should be a list of integers"),
        (QWEN2_5, "rope_scaling.mrope_interleaved", True, "not supported for qwen2_5_vl"),
        (QWEN2_5, "rope_scaling.type", "other", "'other' is not supported; expected one of default"),
        (QWEN3, "text_config.rope_scaling.mrope_interleaved", False, "not supported for qwen3_vl"),
        (QWEN3, "text_config.rope_scaling.mrope_section", [0, 4, 4], "cannot be interleaved: 4 pairs"),
        (QWEN3, "vision_config.num_position_embeddings", 80, "80 should be a square number"),
        (QWEN3, "vision_config.deepstack_visual_indexes", [0, 1, 2, 3, 4], "more entries than the text model has layers, 4"),
        (ERNIE, "moe_num_experts", [8, 4], "the same number of experts"),
        (ERNIE, "moe_layer_start_index", [1, 2], "should have experts in the same layers"),
        (ERNIE, "temporal_conv_size", 3, "3 is not supported; expected 2"),
        (ERNIE, "spatial_conv_size", 3, "differs from vision_config.spatial_merge_size, 2"),
        (ERNIE, "vision_config.embed_dim", 64, "differs from the encoder's hidden_size, 32"),
        (ERNIE, "vocab_size", 303, "<|VIDEO_END|> has no token id below 303"),
        (ERNIE, "im_patch_id", ..., "image_token_id: is missing"),
        (GEMMA, "mm_tokens_per_image", 8, "8 should be the square of a divisor of the 12 patches of a side"),
        (GEMMA, "mm_tokens_per_image", 25, "25 should be the square of a divisor of the 12 patches of a side"),
        (GEMMA, "vision_config.image_size", 100, "100 should be a multiple of patch_size, 8"),
        (GEMMA, "vision_config.model_type", "clip", "'clip' is not supported; supported: 'siglip_vision_model'"),
        (GEMMA, "vision_config.num_attention_heads", 8, "24 should be 8 heads of a multiple of 2"),
        (GEMMA4, "vision_config.head_dim", 66, "66 should be a multiple of 4, for rotary embeddings in two dimensions"),
        (GEMMA4, "vision_config.num_key_value_heads", 4, "4 does not divide num_attention_heads 6"),
        (GEMMA4, "vision_config.rope_parameters.rope_type", "yarn", "'yarn' is not supported; expected 'axial'"),
        (MISTRAL, "text_config.model_type", "qwen2", "'qwen2' is not supported; expected one of mistral, ministral3"),
        (MISTRAL, "vision_config.model_type", "clip", "'clip' is not supported; supported: 'pixtral'"),
        (MISTRAL, "vision_config.head_dim", 32, "32 is not supported; supported: 16"),
        (MISTRAL, "vision_feature_layer", -4, "-4 is not supported; expected one layer, 1 to 3 or -3 to -1, the last"),
        (MISTRAL, "vision_feature_layer", [1, -1], "[1, -1] is not supported; expected one layer"),
        (MISTRAL, "vision_feature_layer", True, "True is not supported; expected one layer"),
        (GEMMA, "image_token_index", 400, "should be an integer of at most 399"),
    ],
)
def test_refused(config: dict[str, Any], path: str, value: Any, text: str, tmp_path: Path) -> None:
    """Ids of media tokens are never missing, for example."""
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path, changed(config, path, value))
    assert text in str(raised.value)


def test_pair_axes() -> None:
    """Published sizes: 64 pairs of Qwen2.5-VL, Qwen3-VL and ERNIE."""
    assert pair_axes("sections", (16, 24, 24)) == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert pair_axes("interleaved", (24, 20, 20)) == (0, 1, 2) * 20 + (0,) * 4
    assert pair_axes("ernie", (22, 22, 20)) == (1, 2) * 22 + (0,) * 20
    with pytest.raises(ValueError, match="as many pairs for height as for width"):
        pair_axes("ernie", (3, 4, 1))
