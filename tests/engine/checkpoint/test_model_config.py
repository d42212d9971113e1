"""config.json in every published style, and every refused value."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.checkpoint.families import MODEL_TYPES
from engine.checkpoint.families.gemma3 import Gemma3
from engine.checkpoint.families.recurrence import MAX_KERNEL
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope_config import RopeConfig
from engine.errors import CheckpointError
from tests.paths import DRAWN, GOLDEN, REPOSITORY
from tests.workers.variants.check_left_out import differences

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
# what transformers 5.23 writes for each family's configuration class
DEFAULTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("default_configs.json").read_text())
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
ERNIE = {**LLAMA, "architectures": ["Ernie4_5ForCausalLM"]}
ERNIE_MOE = {**LLAMA, "architectures": ["Ernie4_5_MoeForCausalLM"]}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.read(directory)


def test_golden() -> None:
    config = ModelConfig.read(GOLDEN / "llama")
    assert (config.architecture, config.num_layers, config.num_kv_heads, config.head_dim) == ("llama", 2, 2, 16)
    assert config.rope == RopeConfig("llama3", 500000.0, 16, False, 4096, 8.0, 256, 1.0, 4.0)
    assert config.eos_token_ids == (2,)
    assert ModelConfig.read(GOLDEN / "ernie4_5").rope.is_interleaved


def test_defaults(directory: Path) -> None:
    llama = read(directory, LLAMA)
    assert (llama.head_dim, llama.num_kv_heads, llama.rms_norm_eps, llama.activation) == (16, 4, 1e-6, "silu")
    assert not (llama.has_qkv_bias)
    assert not (llama.has_output_bias)
    assert not (llama.has_mlp_bias)
    assert not (llama.tie_word_embeddings)
    assert llama.rope == RopeConfig("default", 10000.0, 16, False, 256, 1.0, 256)
    assert llama.eos_token_ids == ()
    assert read(directory, QWEN2).has_qkv_bias
    assert not read(directory, QWEN2).has_output_bias
    assert read(directory, QWEN3).head_dim == 128
    ernie = read(directory, ERNIE)
    assert (ernie.tie_word_embeddings, ernie.rms_norm_eps, ernie.rope.theta) == (True, 1e-5, 500000.0)


def test_null_counts_as_absent(directory: Path) -> None:
    optional = {
        "head_dim": None,
        "num_key_value_heads": None,
        "rope_scaling": None,
        "eos_token_id": None,
        "attention_bias": None,
    }
    assert read(directory, {**LLAMA, **optional}) == read(directory, LLAMA)


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        ({**LLAMA, "attention_bias": True}, (True, True, False, False)),
        ({**LLAMA, "mlp_bias": True}, (False, False, True, False)),
        ({**QWEN3, "attention_bias": True}, (True, True, False, False)),
        ({**ERNIE, "use_bias": True}, (True, True, True, False)),
        ({**ERNIE_MOE, "use_bias": True}, (True, True, True, True)),
    ],
)
def test_biases(config: dict[str, Any], biases: tuple[bool, ...], directory: Path) -> None:
    model = read(directory, config)
    assert (model.has_qkv_bias, model.has_output_bias, model.has_mlp_bias, model.has_head_bias) == biases


def test_end_tokens(directory: Path) -> None:
    """Ids of both files, each once; -1 is none."""
    assert read(directory, {**LLAMA, "eos_token_id": 7}, {"eos_token_id": [9, -1, 7]}).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (0, 9, 9)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, (9, 9, 9)),
        ({"use_sliding_window": True, "sliding_window": 9}, (0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (0, 0, 0)),
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, (0, 0, 0)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, 0, 9),
        ),
    ],
)
def test_sliding_windows(options: dict[str, Any], windows: tuple[int, ...], directory: Path) -> None:
    assert read(directory, {**QWEN2, **options}).sliding_windows == windows
    assert read(directory, {**QWEN3, **options}).sliding_windows == windows


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 5.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}},
        ),
        (
            {
                "rope_theta": 5.0,
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 5.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)
def test_rope_styles_are_equal(older: dict[str, Any], newer: dict[str, Any], directory: Path) -> None:
    assert read(directory, {**LLAMA, **older}) == read(directory, {**LLAMA, **newer})


@pytest.mark.parametrize(
    ("architecture", "kind", "rotary_dim"),
    [
        ("LlamaForCausalLM", "default", 16),
        ("Gemma2ForCausalLM", "default", 16),
        ("LlamaForCausalLM", "linear", 8),
        ("Phi3ForCausalLM", "default", 8),
        ("Glm4ForCausalLM", "default", 8),
    ],
)
def test_families_without_partial_rotation_ignore_it(architecture: str, kind: str, rotary_dim: int, directory: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    config = {**LLAMA, "architectures": [architecture], "head_dim": 16, "rope_parameters": rope}
    assert read(directory, config).rope.rotary_dim == rotary_dim


def test_yarn_factor_from_the_lengths(directory: Path) -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 64, "factor": None}
    assert read(directory, {**LLAMA, "rope_scaling": scaling}).rope.factor == 4.0


def test_dtype(directory: Path) -> None:
    assert read(directory, {**LLAMA, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert read(directory, {**LLAMA, "dtype": "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": [{}]}, "architectures: [{}] should be a list of strings"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 should be an integer of at most"),
        ({"hidden_size": 10**400}, "should be an integer of at most"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor: nan should be a finite number"),
        ({"rms_norm_eps": 10**400}, "should be a finite number"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; expected one of LlamaForCausalLM"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"vocab_size": "many"}, "vocab_size: 'many' should be an integer"),
        ({"hidden_size": True}, "hidden_size: True should be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 should be an integer of at least 1"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1 should be true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "head_dim: is missing, and hidden_size 64"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: 'small' should be a finite number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: -1e-06 should be at least 0"),
        ({"rope_theta": 0}, "rope_theta: 0.0 should be above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, "rope_theta: 1.0 should be above 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "rope_scaling.beta_fast: -1 should be at least 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor: 0 should be above 0"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3}},
            "rope_scaling.high_freq_factor: 3 should be at least 4",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>' should be a token id"),
        ({"eos_token_id": -5}, "eos_token_id: -5 should be a token id"),
        ({"eos_token_id": [2, 10**30]}, "eos_token_id: [2, 10"),
        ({"torch_dtype": "int8"}, "dtype: 'int8' is not supported"),
        ({"quantization_config": {"quant_method": "quark"}}, "quantization_config.quant_method: 'quark' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.short_factor: should be 8 positive numbers"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type: 'proportional' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' should be an object"),
        ({"partial_rotary_factor": 0.45}, "partial_rotary_factor: 0.45"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5"),
    ],
)
def test_refused(changes: dict[str, Any], message: str, directory: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(directory, {**LLAMA, **changes})
    assert message in str(raised.value)
    assert "config.json" in str(raised.value)


def test_unknown_layer_type(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        read(directory, {**QWEN3, "layer_types": ["full_attention", "linear_attention", "full_attention"]})
    with pytest.raises(CheckpointError, match="layer_types"):
        read(directory, {**QWEN3, "layer_types": ["full_attention"]})
    with pytest.raises(CheckpointError, match="layer_types"):
        read(directory, {**QWEN3, "layer_types": 3})


def test_local_rotation_needs_parameters_of_its_own(directory: Path) -> None:
    config = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    with pytest.raises(CheckpointError, match="rope_parameters: should have one entry each for 'full_attention' and"):
        read(directory, config)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"a":' * 100_000])
def test_unreadable(text: str, directory: Path) -> None:
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.read(directory)


def test_no_file(directory: Path) -> None:
    """Opening a FIFO would wait for its other end."""
    os.mkfifo(directory / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        ModelConfig.read(directory)


def test_missing(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelConfig.read(directory)


@pytest.mark.parametrize(("dtype", "head_bytes"), [("float32", 16 * 4), ("bfloat16", 16 * 2), ("int8", 16 + 4)])
def test_bytes_of_the_kv_cache(directory: Path, dtype: str, head_bytes: int) -> None:
    """int8 has a scale for each position and head; an arena has a dummy block besides those of the scheduler."""
    spec = KVCacheSpec.of(read(directory, LLAMA), 16, dtype)
    assert spec.bytes_per_block == 3 * 2 * 16 * 4 * head_bytes
    assert spec.arena_bytes(7) == 8 * spec.bytes_per_block


def test_shape_differences(directory: Path) -> None:
    config = read(directory, LLAMA)
    assert config.shape_differences(replace(config, dtype="bfloat16", eos_token_ids=(5,))) == []
    assert config.shape_differences(replace(config, num_layers=4)) == ["num_layers: 3, 4"]


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"clip_qkv": 8.0}, {"clip_qkv": 8.0}),
        ({"no_rope_layers": [1, 0], "embedding_multiplier": 12}, {"no_rope_layers": [1, 0], "embedding_multiplier": 12}),
        ({"dual_chunk_attention_config": {"chunk_size": 512}}, {"dual_chunk_attention_config": {"chunk_size": 512}}),
        ({"is_causal": True}, {}),
        ({"clip_qkv": None, "use_mrope": False, "attention_dropout": 0.1, "initializer_range": 0.02, "_name_or_path": "x"}, {}),
        ({"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}, {}),  # SmolLM2
    ],
)
def test_unknown_options_are_known(changes: dict[str, Any], unknown: dict[str, Any], directory: Path) -> None:
    assert read(directory, {**LLAMA, **changes}).unknown_options == unknown


def test_decoders_that_attend_both_ways(directory: Path) -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
    gemma = {**LLAMA, "architectures": ["Gemma3TextModel"], "head_dim": 16, **windows}
    assert not read(directory, gemma).is_bidirectional
    both = read(directory, gemma | {"use_bidirectional_attention": True})
    assert (both.is_bidirectional, both.sliding_windows, both.task) == (True, (5, 0, 5), "embed")
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 8, "is_causal": False}
    both = read(directory, mistral)
    assert (both.is_bidirectional, both.sliding_windows, both.task) == (True, (9, 9, 9), "embed")
    with pytest.raises(CheckpointError, match="is_causal: False is not supported"):
        read(directory, gemma | {"use_bidirectional_attention": True, "is_causal": False})
    latent = {"architectures": ["DeepseekV3ForCausalLM"], "is_causal": False, "q_lora_rank": 8, "kv_lora_rank": 16}
    latent |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    with pytest.raises(CheckpointError, match="is_causal: false is not supported for deepseek_v3"):
        read(directory, {**LLAMA, **latent})


def test_other_scores_of_minimax_are_refused(directory: Path) -> None:
    minimax = {**LLAMA, "architectures": ["MiniMaxM2ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16}
    assert read(directory, {**minimax, "scoring_func": "sigmoid"}).unknown_options == {}
    published = {"layernorm_mlp_beta": 1.0, "swa_rope_theta": -1.0, "use_grouped_topk": True, "num_expert_group": None}
    assert read(directory, {**minimax, **published}).unknown_options == {}
    with pytest.raises(CheckpointError, match=r"layernorm_mlp_beta: 2.0 is not supported; supported: 1.0"):
        read(directory, {**minimax, "layernorm_mlp_beta": 2.0})
    with pytest.raises(CheckpointError, match="scoring_func: 'softmax' is not supported; supported: 'sigmoid'"):
        read(directory, {**minimax, "scoring_func": "softmax"})


def test_classifiers_neither_scale_nor_cap_their_scores(directory: Path) -> None:
    options = {**LLAMA, "logits_scaling": 4.0, "head_dim": 16, "id2label": {"0": "a", "1": "b"}}
    for name, values in (("Granite", (0.25, 0.0)), ("Gemma2", (1.0, 30.0))):
        for task, expected in (("ForCausalLM", values), ("ForSequenceClassification", (1.0, 0.0))):
            found = read(directory, {**options, "architectures": [name + task]}).multipliers
            assert (found.logits, found.softcap_of_logits) == expected, (name, task)


def test_options_of_published_files_are_known(directory: Path) -> None:
    """Gemma 2 has two names for some options, and ERNIE's files those of its training."""
    gemma2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}
    gemma2 |= {"hidden_activation": "gelu_pytorch_tanh", "sliding_window_size": 4096, "cache_implementation": "hybrid"}
    assert read(directory, gemma2).unknown_options == {}
    assert read(directory, {**ERNIE, "fuse_rms_norm": True, "micro_batch_size": 2}).unknown_options == {}


def test_options_of_experts_that_no_layer_has_are_known(directory: Path) -> None:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0, 1, 2]}
    model = read(directory, {**QWEN3, **options, "architectures": ["Qwen3MoeForCausalLM"]})
    assert (model.unknown_options, model.experts) == ({}, None)


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"sliding_window_pattern": 4}, {"sliding_window_pattern": 4}),
        ({"no_rope_layer_interval": 4}, {"no_rope_layer_interval": 4}),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, {"rope_parameters.llama_4_scaling_beta": 0.1}),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, {"rope_scaling.alpha": 1000.0}),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 0], "no_rope_layer_interval": 3}, {}),
        ({"architectures": ["Cohere2ForCausalLM"], "sliding_window_pattern": 4}, {}),
        ({"architectures": ["Starcoder2ForCausalLM"], "scale_attn_weights": True, "layer_norm_epsilon": 1e-5}, {}),
        ({"architectures": ["Cohere2ForCausalLM"], "layer_switch": 4, "use_parallel_embedding": True}, {}),
        ({"architectures": ["HunYuanDenseV1ForCausalLM"], "moe_topk": 1, "vit_patch": 1, "use_cla": True}, {"use_cla": True}),
    ],
    ids=str,
)
def test_options_of_other_families_and_inner_objects_are_known(
    changes: dict[str, Any], unknown: dict[str, Any], directory: Path
) -> None:
    assert read(directory, {**LLAMA, **changes}).unknown_options == unknown


def test_unknown_options_of_vision_models_are_known(directory: Path) -> None:
    """Options beside the text model's object count unless it has them too."""
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    options = json.loads((GOLDEN / "qwen3_vl" / "config.json").read_text())
    assert read(directory, options).unknown_options == {}
    options["text_config"] |= {"clip_qkv": 3.0}
    options["vision_config"] |= {"window_pattern": 2, "spatial_patch_size": 16}
    options |= {"num_memory_tokens": 8, "hidden_size": 7}
    expected = {"text_config.clip_qkv": 3.0, "vision_config.window_pattern": 2, "num_memory_tokens": 8}
    assert read(directory, options).unknown_options == expected


def test_kimi_is_read_as_deepseek_v3(directory: Path) -> None:
    kimi = {key: value for key, value in DEFAULTS["deepseek_v3"].items() if key != "architectures"} | {"model_type": "kimi_k2"}
    assert read(directory, kimi).architecture == "deepseek_v3"


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_default_configurations_have_no_unknown_options(model_type: str, directory: Path) -> None:
    config = DEFAULTS[model_type] | {"architectures": [MODEL_TYPES[model_type].class_names[0]]}
    assert read(directory, config).unknown_options == {}


LEFT_OUT: list[dict[str, Any]] = json.loads((REPOSITORY / "tests" / "workers" / "variants" / "left_out.json").read_text())


def test_options_left_out_have_transformers_defaults(directory: Path) -> None:
    found = [problem for case in LEFT_OUT for problem in differences(case, directory)]
    assert found == []
    assert len(LEFT_OUT) == 44


@pytest.mark.parametrize(("left_out", "heads", "found"), [(True, 8, 4), (False, 8, 8), (True, 6, 6)])
def test_kv_heads_have_a_default_that_fits(left_out: bool, heads: int, found: int, directory: Path) -> None:
    """A null is no default, and one that does not divide the heads is none either."""
    config = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "num_attention_heads": heads, "head_dim": 16}
    config.pop("num_key_value_heads", None)
    config |= {} if left_out else {"num_key_value_heads": None}
    assert read(directory, config).num_kv_heads == found


@pytest.mark.parametrize(("stored", "is_tied"), [((), True), (("model.norm",), True), (("model.norm", "lm_head"), False)])
def test_outer_object_ties_unless_a_head_is_stored(stored: tuple[str, ...], is_tied: bool, directory: Path) -> None:
    config = copy.deepcopy(next(each["config"] for name, each in SEEING.items() if name.startswith("gemma3")))
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    config.pop("tie_word_embeddings", None)
    config["text_config"]["tie_word_embeddings"] = False
    if stored:
        index = {"weight_map": {f"{name}.weight": "model-1.safetensors" for name in stored}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read(directory, config).tie_word_embeddings == is_tied


VARIANTS: dict[str, Any] = json.loads((DRAWN / "variants.json").read_text())
SEEING: dict[str, Any] = json.loads((DRAWN / "seeing.json").read_text())
HOSTILE = (-1, 1e308, "", 1 << 70, [], float("nan"), 0, {"a": [1 << 70]}, True, [10**400], "x", float("-inf"), [None], 1 << 39)


def places(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def test_hostile_values_are_refused_or_read(directory: Path) -> None:
    """Any option of any variant with a value of another kind or size: an error that names the file, nothing else."""
    for number, variant in enumerate([*VARIANTS.values(), *SEEING.values()]):
        for place, path in enumerate(places(variant["config"])):
            config = copy.deepcopy(variant["config"])
            options = config
            for name in path[:-1]:
                options = options[name]
            options[path[-1]] = HOSTILE[(number + place) % len(HOSTILE)]
            with contextlib.suppress(CheckpointError):
                KVCacheSpec.of(read(directory, config), 16, "int8")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("exaone4", {"sliding_window_pattern": ""}, "sliding_window_pattern: '' should consist of L .local. and G .global."),
        ("exaone4", {"sliding_window_pattern": "LLXG"}, "sliding_window_pattern: 'LLXG' should consist of L"),
        ("phi3", {"partial_rotary_factor": 1e308}, r"partial_rotary_factor: 1e\+308 should be at most 1"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [10**400]}}, "short_factor: .* list of finite numbers"),
        ("hunyuan_v1_dense", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 2.0}}, "alpha: 2.0 needs a head_dim"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1e308}}, r"alpha: 1e\+308 with rope_theta"),
        ("mamba2", {"time_step_limit": [0, {"__float__": []}]}, "time_step_limit: .* should be two numbers"),
        ("mamba2", {"time_step_limit": "0.1"}, "time_step_limit: '0.1' should be two numbers"),
        ("lfm2", {"block_ff_dim": 40}, "block_ff_dim: 40 should be intermediate_size, which is 72"),
        ("lfm2", {"tie_word_embeddings": True, "tie_embedding": False}, "tie_embedding: False should be tie_word_embeddings"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ("lfm2", {"conv_L_cache": MAX_KERNEL + 1}, "conv_L_cache: 17 should be an integer of at most 16"),
    ],
)
def test_wrong_values_of_families_are_named(family: str, changes: dict[str, Any], message: str, directory: Path) -> None:
    config = next(each["config"] for name, each in VARIANTS.items() if name.startswith(family))
    config = {name: value for name, value in config.items() if name != "rope_parameters"}
    with pytest.raises(CheckpointError, match=message):
        read(directory, config | changes)


@pytest.mark.parametrize(
    ("family", "published"),
    [
        (
            "qwen3_5",
            {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish", "mlp_only_layers": []},
        ),
        ("lfm2", {"block_dim": 48, "block_norm_eps": 1e-5, "block_mlp_init_scale": 1.0, "num_heads": 4, "use_pos_enc": True}),
        ("lfm2", {"intermediate_size": None, "block_ff_dim": 72, "tie_embedding": True, "theta": 1e6}),
        ("falcon_h1", {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3, "time_step_rank": "auto"}),
        ("mamba2", {"rms_norm": True, "time_step_init_scheme": "random", "time_step_scale": 1.0, "time_step_rank": 256}),
        ("nemotron_h", {"num_query_groups": 8, "time_step_rank": 256, "rms_norm_eps": 1e-5}),
    ],
)
def test_options_of_published_recurrent_models_are_known(family: str, published: dict[str, Any], directory: Path) -> None:
    config = VARIANTS[family]["config"]
    plain, found = read(directory, config), read(directory, config | published)
    assert found.unknown_options == {}
    assert (found.intermediate_size, found.tie_word_embeddings) == (plain.intermediate_size, plain.tie_word_embeddings)


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h"])
def test_head_is_never_tied_where_transformers_has_its_own(family: str, directory: Path) -> None:
    assert not read(directory, VARIANTS[family]["config"] | {"tie_word_embeddings": True}).tie_word_embeddings


def test_mlp_ratio_is_bounded(directory: Path) -> None:
    config = copy.deepcopy(next(each["config"] for name, each in SEEING.items() if name.startswith("qwen2_vl")))
    config["vision_config"]["mlp_ratio"] = 1e308
    with pytest.raises(CheckpointError, match=r"mlp_ratio: 1e\+308 should be at most 1024"):
        read(directory, config)


@pytest.mark.parametrize("name", ["use_rope", "use_rotary_embedding", "use_rotary", "rotary"])
def test_false_may_change_answers(name: str, directory: Path) -> None:
    """Other options are off if they are false."""
    assert read(directory, LLAMA | {name: False, "use_other": False}).unknown_options == {name: False}


def test_gemma3_caps_what_transformers_caps(directory: Path) -> None:
    """Scores are not capped, and logits only by the text model."""
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
    text = next(each["config"] for name, each in VARIANTS.items() if name.startswith("gemma3_text"))
    config = copy.deepcopy(next(each["config"] for name, each in SEEING.items() if name.startswith("gemma3 ")))
    config["text_config"] |= caps
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    for found, logits in ((read(directory, text | caps), 2.0), (read(directory, config), 0.0)):
        assert (found.multipliers.softcap_of_scores, found.multipliers.softcap_of_logits) == (0.0, logits)
        assert found.unknown_options == {}


@pytest.mark.parametrize(
    ("family", "name", "other"),
    [
        ("deepseek_v2", "n_routed_experts", "num_experts"),
        ("mixtral", "num_local_experts", "num_experts"),
        ("glm4_moe", "n_routed_experts", "num_local_experts"),
        ("ernie4_5_vl_moe", "moe_num_experts", "num_experts"),
        ("ernie4_5_vl_moe", "moe_k", "num_experts_per_tok"),
        ("qwen2_vl", "depth", "num_hidden_layers"),
    ],
)
def test_other_names_of_options_are_read(family: str, name: str, other: str, directory: Path) -> None:
    """Names in the `attribute_map` of transformers' configuration classes."""
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    variants = (VARIANTS | SEEING).items()
    config = copy.deepcopy(next(each["config"] for title, each in variants if each["config"]["model_type"] == family))
    expected = read(directory, config)
    places = (config.get("vision_config", {}), config.get("text_config", {}), config)
    options = next(place for place in places if name in place)
    options[other] = options.pop(name)
    assert read(directory, config) == expected


def test_mtp_layers_have_two_names(directory: Path) -> None:
    config = next(each["config"] for name, each in VARIANTS.items() if name.startswith("glm4_moe "))
    for name in ("num_mtp_layers", "num_nextn_predict_layers"):
        found = read(directory, config | {name: 2, "new_option": 3})
        assert (found.num_draft_layers, found.unknown_options) == (2, {"new_option": 3})


@pytest.mark.parametrize(("version", "is_tied"), [("5.23.0", False), ("4.57.1", True), (None, True)])
def test_version_of_a_file_says_which_object_ties(version: str | None, is_tied: bool, directory: Path) -> None:
    config = json.loads((GOLDEN / "qwen3_vl" / "config.json").read_text())
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    config |= {"transformers_version": version, "tie_word_embeddings": False}
    config["text_config"]["tie_word_embeddings"] = True
    assert read(directory, config).tie_word_embeddings == is_tied


@pytest.mark.parametrize("kind", [None, "llama", "mistral"])
def test_llava_reads_each_kind_of_text_model(kind: str | None, directory: Path) -> None:
    """Llama is the default; only Mistral has a window."""
    config = copy.deepcopy(next(each["config"] for name, each in SEEING.items() if name.startswith("llava")))
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    names = {"4": {"content": "[IMG_END]"}, "7": {"content": "[IMG_BREAK]"}}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    config["text_config"] |= {"model_type": kind, "sliding_window": 8, "attention_bias": True, "mlp_bias": True}
    found = read(directory, config | {"image_seq_length": 576})
    is_mistral = kind == "mistral"
    assert set(found.sliding_windows) == ({8} if is_mistral else {0})
    assert found.has_qkv_bias == found.has_mlp_bias == (not is_mistral)
    assert "image_seq_length" not in found.unknown_options


def test_sizes_left_out_of_pixtral_are_those_of_mistral(directory: Path) -> None:
    """Transformers 4.46 wrote the published file."""
    text = {"model_type": "mistral", "vocab_size": 131_072, "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40}
    vision = {"model_type": "pixtral", "head_dim": 64, "is_composition": True}
    config = {"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 10, "ignore_index": -100}
    config |= {"text_config": text, "vision_config": vision, "vision_feature_select_strategy": "full"}
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    names = {"4": {"content": "[IMG_END]"}, "7": {"content": "[IMG_BREAK]"}}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    found = read(directory, config)
    assert (found.num_attention_heads, found.num_kv_heads, found.intermediate_size) == (32, 8, 14_336)
    assert found.unknown_options == {}


def test_llama4_with_an_encoder_is_served_for_text(directory: Path) -> None:
    text = next(each["config"] for name, each in VARIANTS.items() if name == "llama4_text")
    config = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    found = read(directory, config | {"vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408}})
    assert (found.lacks_encoder, found.unknown_options) == (True, {})
    assert not read(directory, config).lacks_encoder


def test_experts_of_no_layer_are_read(directory: Path) -> None:
    config = copy.deepcopy(next(each["config"] for name, each in SEEING.items() if name.startswith("qwen3_vl_moe")))
    config["text_config"]["decoder_sparse_step"] = 9
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    found = read(directory, config)
    assert (found.experts, found.unknown_options) == (None, {})


@pytest.mark.parametrize(("num_layers", "scalar"), [(61, 128), (62, 168)])
def test_gemma3_scales_scores_by_the_number_of_layers(num_layers: int, scalar: int) -> None:
    """Scale as in llama.cpp: 27B by hidden_size / heads, others by the width of a head."""
    values = {"attention.key_length": 128, "embedding_length": 5376, "attention.head_count": 32}
    found = Gemma3().of_gguf(JsonOptions(values, Path("a.gguf")), num_layers)
    assert found["query_pre_attn_scalar"] == scalar
