"""GGUF files: the weights of the embedded model in every type, and golden answers of every architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.locate import resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.config import SpeculativeConfig
from engine.errors import CheckpointError
from engine.messages import SamplingParams
from ops.cpu.array import array_of
from ops.cpu.table import TABLE
from ops.weight_format import WeightFormat, float32
from tests.ggufs import as_type, original_metadata, write_gguf
from tests.workers.checkpoints import TINY, drawn_tensors, to_gpt_oss_layout, write_checkpoint, write_config, write_safetensors
from tests.workers.mtp import drafting, write_with_layers
from tests.workers.serving import ARCHITECTURES, GOLDEN, ServedSequence, Serving, golden_cases, golden_sequences, make_runner
from tests.workers.test_variants import ADDED_TOKENS, PROCESSOR, SEEING, VARIANTS
from tests.workers.variants import dequantized, mxfp4
from tests.workers.weights.formats.quantizers import DEMO
from tests.workers.weights.formats.test_blocks import random_blocks
from workers.models import declare_model
from workers.models.loading import load_model
from workers.weights.formats.block_types import INTEGERS
from workers.weights.reader import Checkpoint

PLAIN: dict[str, Any] = {  # metadata of a vocabulary that is not used
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__tokens": ["a"],
    "tokenizer__ggml__token_type": [1],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint_of(path: Path) -> Checkpoint:
    config = ModelConfig.read(path)
    _, weights = declare_model(config)
    return Checkpoint(path, config, weights)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_weights_are_exact(type_name: str, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "demo.gguf", DEMO, as_type(type_name), **original_metadata(DEMO))
    checkpoint = checkpoint_of(resolve_model(str(tmp_path / "demo.gguf")))
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), values, err_msg=name)


def test_mixed_superblocks_are_decoded(tmp_path: Path) -> None:
    """Q4_K with Q6_K for some, like llama.cpp's Q4_K_M; Llama, so that rows of queries and keys are in another order."""
    config = {
        **TINY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    source = tmp_path / "source"
    tensors = drawn_tensors(write_config(source, config))
    write_safetensors(source / "model.safetensors", tensors)
    stored: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if values.ndim == 1:
            return values, gguf.GGMLQuantizationType.F32
        type_name = "Q6_K" if "ffn_down" in name or name == "output.weight" else "Q4_K"
        blocks = random_blocks(type_name, values.size // 256).reshape(len(values), -1)
        stored[name] = blocks, gguf.GGMLQuantizationType[type_name]
        return stored[name]

    write_gguf(tmp_path / "tiny.gguf", source, encode, **PLAIN)
    checkpoint = checkpoint_of(resolve_model(str(tmp_path / "tiny.gguf")))
    for name, part in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj"), ("ffn_up", "mlp.up_proj")):
        expected = gguf.quants.dequantize(*stored[f"blk.1.{name}.weight"])
        np.testing.assert_array_equal(checkpoint.read(f"model.layers.1.{part}.weight"), expected)
    raw = gguf.quants.dequantize(*stored["blk.0.attn_k.weight"])
    halves = raw.reshape(2, 32, 2, 256)
    expected = np.concatenate([np.concatenate([head[:, 0], head[:, 1]]) for head in halves])
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.k_proj.weight"), expected)


def test_mixed_superblocks_are_served(tmp_path: Path) -> None:
    """llama.cpp's Q4_K_M: q, k and v are in one matrix, 4 bits with offsets beside 6. Native ops compute with the stored
    integers, so the results are those of the float32 weights, except for the rounded activations."""
    config = {**TINY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = tmp_path / "source"
    config |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    write_safetensors(source / "model.safetensors", drawn_tensors(write_config(source, config)))

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if values.ndim == 1:
            return values, gguf.GGMLQuantizationType.F32
        type_name = "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"
        blocks = random_blocks(type_name, values.size // 256).reshape(len(values), -1)
        return blocks, gguf.GGMLQuantizationType[type_name]

    write_gguf(tmp_path / "tiny.gguf", source, encode, **PLAIN)
    path = resolve_model(str(tmp_path / "tiny.gguf"))
    model_config = ModelConfig.read(path)
    model: Any = load_model(path, model_config, TABLE, 16, lambda done, total: None).model
    checkpoint = checkpoint_of(path)
    x = np.random.default_rng(0).standard_normal((5, 256), np.float32)
    qkv = model.layers[0].qkv
    assert qkv.format == WeightFormat("int8", 16, True)
    weight = np.concatenate([checkpoint.read(f"{name}.weight") for name in qkv.names])
    found, expected = TABLE.linear(array_of(x), qkv).numpy(), x @ weight.T
    assert np.abs(found - expected).mean() < 0.02 * np.abs(expected).mean()
    assert model.layers[0].mlp.gate_up.format == WeightFormat("int4", 32, True)


@pytest.mark.parametrize(
    ("attention", "mlp", "of_attention", "of_mlp"),
    [
        ("Q3_K", "Q2_K", WeightFormat("int4", 16), WeightFormat("int4", 16, True)),
        ("IQ4_NL", "IQ4_XS", WeightFormat("int8", 32, scales="float16"), WeightFormat("int8", 32)),
        ("IQ3_S", "IQ3_XXS", WeightFormat("int4", 32, True), WeightFormat("int8", 32)),
        ("IQ2_S", "IQ2_XXS", WeightFormat("int8", 16), WeightFormat("int8", 32)),
        ("IQ1_M", "IQ1_S", WeightFormat("int8", 16), WeightFormat("int4", 32, True)),
        ("TQ2_0", "TQ1_0", *2 * [WeightFormat("int4", 128, scales="float16")]),
    ],
)
def test_small_types_are_served(
    attention: str, mlp: str, of_attention: WeightFormat, of_mlp: WeightFormat, tmp_path: Path
) -> None:
    """The answers of the same weights as floats, and native linears that differ from them only by rounded activations."""
    config = {**TINY, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    source = tmp_path / "source"
    drawn = drawn_tensors(write_config(source, config))
    write_safetensors(source / "model.safetensors", drawn)

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if ("attn_" not in name and "ffn_" not in name) or values.ndim == 1:
            return values, gguf.GGMLQuantizationType.F32
        type_name = attention if "attn_" in name else mlp
        blocks = random_blocks(type_name, values.size // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0])
        return blocks.reshape(len(values), -1), gguf.GGMLQuantizationType[type_name]

    write_gguf(tmp_path / "tiny.gguf", source, encode, **PLAIN)
    path = resolve_model(str(tmp_path / "tiny.gguf"))
    checkpoint = checkpoint_of(path)
    write_safetensors(source / "model.safetensors", {name: checkpoint.read(name) for name in drawn})
    answers = []
    for place in (path, source):
        serving = Serving(make_runner(place, ops="reference", plan="eager", max_model_len=64, num_kv_blocks=10))
        sequence = ServedSequence(list(range(3, 20)), SamplingParams(temperature=0.0, num_logprobs=2), num_outputs=8)
        serving.place(sequence, 0)
        serving.run([sequence])
        answers.append(sequence.answer())
    assert answers[0] == answers[1]
    model: Any = load_model(path, ModelConfig.read(path), TABLE, 16, lambda done, total: None).model
    x = np.random.default_rng(0).standard_normal((5, 256), np.float32)
    for linear, format in ((model.layers[0].output, of_attention), (model.layers[0].mlp.gate_up, of_mlp)):
        assert linear.format == format
        weight = np.concatenate([checkpoint.read(f"{name}.weight") for name in linear.names])
        found, expected = TABLE.linear(array_of(x), linear).numpy(), x @ weight.T
        assert np.abs(found - expected).mean() < 0.02 * np.abs(expected).mean()


def test_gguf_gives_the_same_answers(tmp_path: Path) -> None:
    """The embedded model, from float32 in a GGUF file: the same tokens and log-probabilities, bit for bit."""
    write_gguf(tmp_path / "demo.gguf", DEMO, as_type("F32"), **original_metadata(DEMO))
    answers = []
    for path in (resolve_model(str(tmp_path / "demo.gguf")), DEMO):
        serving = Serving(make_runner(path))
        sequence = ServedSequence(list(range(3, 40)), SamplingParams(temperature=0.0, num_logprobs=5))
        serving.place(sequence, 0)
        serving.run([sequence])
        answers.append(sequence.answer())
    assert answers[0] == answers[1]


def test_mxfp4_experts_are_kept(tmp_path: Path) -> None:
    """The same numbers as in the checkpoint that the file was made of, in 4 bits."""
    config = VARIANTS["gpt_oss mxfp4"]["config"]
    model = write_config(tmp_path / "source", {key: value for key, value in config.items() if key != "quantization_config"})
    tensors = to_gpt_oss_layout(drawn_tensors(model), is_packed=False)
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." in name and tensor.ndim == 3}
    tensors |= {name: dequantized(*mxfp4(tensor.swapaxes(1, 2))).swapaxes(1, 2) for name, tensor in packed.items()}
    write_safetensors(tmp_path / "source" / "model.safetensors", tensors)

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        return as_type("MXFP4" if "_exps.weight" in name else "F32")(name, values)

    write_gguf(tmp_path / "experts.gguf", tmp_path / "source", encode, **PLAIN)
    checkpoint, source = checkpoint_of(resolve_model(str(tmp_path / "experts.gguf"))), checkpoint_of(tmp_path / "source")
    for name in declare_model(model)[1].shapes():
        np.testing.assert_array_equal(checkpoint.read(name), source.read(name), err_msg=name)
        is_packed = ".experts." in name and name.endswith(".weight")
        assert checkpoint.kept(name) == (WeightFormat("float4", 32, scales="bfloat16") if is_packed else None)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if FAMILIES[name].gguf_name is not None])
def test_golden_models_survive_conversion(architecture: str, tmp_path: Path) -> None:
    """Shape, names, the order of rows, biases and rope (scaled in Llama) all come out unchanged."""
    source = GOLDEN / architecture
    write_gguf(tmp_path / "golden.gguf", source, as_type("F32"), **original_metadata(source))
    path = resolve_model(str(tmp_path / "golden.gguf"))
    found, original = ModelConfig.read(path), ModelConfig.read(source)
    assert {difference.split(":")[0] for difference in original.shape_differences(found)} <= {"rope"}
    serving = Serving(make_runner(path))
    sequences = golden_sequences(architecture)[:4]
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    serving.run(sequences)
    assert [sequence.outputs for sequence in sequences] == [case["greedy_token_ids"] for case in golden_cases(architecture)[:4]]


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "granite multipliers", "smollm3", "seed_oss", "glm4", "exaone4 local layers rotated, global ones not"),
        *(
            "qwen2_moe",
            "deepseek_v2",
            "deepseek_v2 groups",
            "cohere",
            "cohere norms of heads",
            "cohere2",
            "hunyuan_v1_dense",
            "starcoder2",
            "granitemoeshared",
            "llama4_text",
            "ministral3 scaled queries, yarn",
            "gpt_oss",
            "glm4_moe head norms, groups",
            "glm4_moe biases, all layers sparse, plain weights",
            "minimax_m2",
            "qwen3_next",
            "qwen3_5 tied, one KV head, odd sizes",
            "qwen3_5_moe",
            "lfm2",
            "lfm2_moe",
            "granitemoehybrid",
            "kimi_linear",
            "olmo2 biases",
            "olmo2 odd width",
            "olmo3 windows, yarn in the other layers",
            "gemma4_text inputs of each layer, shared keys, wide MLP",
            "gemma4_text keys as values",
            "gemma4_text experts beside an MLP, odd head sizes",
        ),
    ],
)
def test_variants_survive_conversion(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    write_checkpoint(tmp_path, variant["config"])
    write_gguf(tmp_path / "variant.gguf", tmp_path, as_type("F32"), **PLAIN)
    serving = Serving(make_runner(resolve_model(str(tmp_path / "variant.gguf")), max_model_len=128, num_kv_blocks=40))
    sequence = ServedSequence(variant["prompt_token_ids"], SamplingParams(temperature=0.0), len(variant["greedy_token_ids"]))
    serving.place(sequence, 1)
    serving.run([sequence])
    assert sequence.outputs == variant["greedy_token_ids"]


def test_columns_of_a_quantized_table_are_decoded_alone(tmp_path: Path) -> None:
    """Gemma 4 has an embedding for each layer in one table: columns at whole blocks, and others."""
    options = VARIANTS["gemma4_text inputs of each layer, shared keys, wide MLP"]["config"]
    write_checkpoint(tmp_path, {**options, "hidden_size_per_layer_input": 32})

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        return as_type("Q8_0" if name == "per_layer_token_embd.weight" else "F32")(name, values)

    expected = write_gguf(tmp_path / "table.gguf", tmp_path, encode, **PLAIN)
    path = resolve_model(str(tmp_path / "table.gguf"))
    config, checkpoint = ModelConfig.read(path), checkpoint_of(path)
    assert (config.unknown_options, config.lacks_encoder) == ({}, False)
    name = "model.embed_tokens_per_layer.weight"
    for columns in (slice(0, 32), slice(64, 128), slice(40, 50)):
        np.testing.assert_array_equal(checkpoint.read_columns(name, columns), expected[name][:, columns])
    assert (checkpoint.has_rows(name), checkpoint.has_rows(name, is_whole=False)) == (True, False)
    np.testing.assert_array_equal(checkpoint.read_rows(name, 3, 9), expected[name][3:9])
    model: Any = load_model(path, config, TABLE, 16, lambda done, total: None).model
    table = model.tables[2].weight.values.numpy().reshape(len(expected[name]), 32)
    np.testing.assert_array_equal(table, expected[name][:, 64:96])


@pytest.mark.parametrize(
    ("name", "is_shared"), [("glm4_moe head norms, groups", False), ("glm4_moe_lite", False), ("glm4_moe_lite", True)]
)
def test_mtp_layers_of_gguf_files_are_read(name: str, is_shared: bool, tmp_path: Path) -> None:
    """`is_shared`: the layer that drafts has no head of its own in the file."""
    config = VARIANTS[name]["config"] | {"mlp_layer_types": None, "first_k_dense_replace": 1}
    tensors = write_with_layers(tmp_path, config)
    head = "model.layers.2.shared_head.head.weight"
    if is_shared:
        write_safetensors(tmp_path / "model.safetensors", {key: value for key, value in tensors.items() if key != head})
    write_gguf(tmp_path / "drafts.gguf", tmp_path, as_type("F32"), **PLAIN)
    path = resolve_model(str(tmp_path / "drafts.gguf"))
    found, original = ModelConfig.read(path), ModelConfig.read(tmp_path)
    assert (found.num_layers, found.num_draft_layers) == (original.num_layers, original.num_draft_layers) == (2, 1)
    _, weights = declare_model(found, has_drafts=True)
    checkpoint = Checkpoint(path, found, weights)
    expected = tensors | {head: tensors["lm_head.weight"]} if is_shared else tensors
    for each in weights.shapes():
        np.testing.assert_array_equal(checkpoint.read(each), expected[each], err_msg=each)
    answers = []
    for drafts in (SpeculativeConfig(), drafting(3)):
        serving = Serving(make_runner(path, max_model_len=128, num_kv_blocks=40, speculative_config=drafts))
        sequence = ServedSequence(VARIANTS[name]["prompt_token_ids"], SamplingParams(temperature=0.0), 8)
        serving.place(sequence, 1)
        serving.run([sequence])
        answers.append(sequence.outputs)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["bamba", "mamba2", "nemotron_h", "falcon_h1"])
def test_mamba_layers_survive_conversion(name: str, tmp_path: Path) -> None:
    """The answers of the checkpoint, also where files have constant factors in the weights."""
    config = VARIANTS[name]["config"]
    if name == "nemotron_h":  # files have experts or other MLPs
        config = {**config, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
    write_checkpoint(tmp_path, config)
    write_gguf(tmp_path / "mamba.gguf", tmp_path, as_type("F32"), **PLAIN)
    path = resolve_model(str(tmp_path / "mamba.gguf"))
    assert ModelConfig.read(path).unknown_options == {}
    answers = []
    for place in (path, tmp_path):
        serving = Serving(make_runner(place, max_model_len=128, num_kv_blocks=40))
        sequence = ServedSequence(VARIANTS[name]["prompt_token_ids"], SamplingParams(temperature=0.0, num_logprobs=2), 8)
        serving.place(sequence, 1)
        serving.run([sequence])
        answers.append(sequence)
    assert answers[0].outputs == answers[1].outputs
    np.testing.assert_allclose(answers[0].logprobs, answers[1].logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "type_name"), [("qwen3_next", "F32"), ("qwen3_5", "F32"), ("qwen3_5", "Q8_0"), ("qwen3_5", "Q4_0")]
)
def test_recurrent_and_mtp_layers_are_restored(name: str, type_name: str, tmp_path: Path) -> None:
    """Qwen3.5's value heads, which files have in another order, also where blocks of integers are kept."""
    wide = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "moe_intermediate_size"), 32)
    config = {**VARIANTS[name]["config"], **wide, "hidden_size": 64, "intermediate_size": 64, "num_nextn_predict_layers": 1}
    tensors = write_with_layers(tmp_path, config)
    write_gguf(tmp_path / "recurrent.gguf", tmp_path, as_type(type_name), **PLAIN)
    path = resolve_model(str(tmp_path / "recurrent.gguf"))
    model = ModelConfig.read(path)
    assert (model.num_layers, model.num_draft_layers, model.unknown_options) == (4, 1, {})
    checkpoint = Checkpoint(path, model, declare_model(model, has_drafts=True)[1])
    for each, values in tensors.items():
        expected = values
        if "norm" in each and ".linear_attn." not in each:
            expected = values + np.float32(1)
        elif "_proj" in each:
            raw, kind = as_type(type_name)(each, values)
            expected = gguf.quants.dequantize(raw, kind).reshape(values.shape)
        if not each.startswith("model.embed") and each not in ("lm_head.weight", "mtp.fc.weight"):
            np.testing.assert_allclose(checkpoint.read(each), expected, rtol=1e-6, atol=1e-7, err_msg=each)
    output = "model.layers.1.linear_attn.out_proj.weight"
    if type_name != "F32":
        format = INTEGERS[type_name][0]
        assert checkpoint.kept(output) == format
        np.testing.assert_array_equal(float32(checkpoint.read_integers(output, format)), checkpoint.read(output))


def test_heads_that_share_blocks_of_integers_are_decoded(tmp_path: Path) -> None:
    """Blocks of 32 columns, and heads of 8 whose order changes."""
    config = {**VARIANTS["qwen3_5"]["config"], "hidden_size": 64, "intermediate_size": 64, "linear_key_head_dim": 32}
    write_checkpoint(tmp_path, config)
    write_gguf(tmp_path / "recurrent.gguf", tmp_path, as_type("Q8_0"), **PLAIN)
    checkpoint = checkpoint_of(resolve_model(str(tmp_path / "recurrent.gguf")))
    kept = checkpoint.kept("model.layers.1.linear_attn.out_proj.weight")
    assert kept == "groups of 8 columns are reordered, and 32 columns share a scale"
    source = checkpoint_of(tmp_path)
    for name in ("out_proj.weight", "in_proj_z.weight", "A_log"):
        found, expected = (each.read(f"model.layers.1.linear_attn.{name}") for each in (checkpoint, source))
        np.testing.assert_allclose(found, expected, atol=0.01)


def test_recurrent_heads_without_weights_are_refused(tmp_path: Path) -> None:
    """Sizes of heads in the metadata that would take 64 GiB of row numbers."""
    write_checkpoint(tmp_path, VARIANTS["qwen3_5"]["config"])
    write_gguf(tmp_path / "wide.gguf", tmp_path, as_type("F32"), **PLAIN, qwen35__ssm__state_size=(1 << 31) - 1)
    with pytest.raises(CheckpointError, match=r"linear_attn\.in_proj_qkv.* has shape"):
        checkpoint_of(resolve_model(str(tmp_path / "wide.gguf")))


def test_drafts_of_a_recurrent_gguf_do_not_change_answers(tmp_path: Path) -> None:
    write_with_layers(tmp_path, VARIANTS["qwen3_next"]["config"])
    write_gguf(tmp_path / "drafts.gguf", tmp_path, as_type("F32"), **PLAIN)
    path = resolve_model(str(tmp_path / "drafts.gguf"))
    answers = []
    for place, drafts in ((tmp_path, SpeculativeConfig()), (path, drafting(3))):
        serving = Serving(make_runner(place, max_model_len=128, num_kv_blocks=40, speculative_config=drafts))
        sequence = ServedSequence(VARIANTS["qwen3_next"]["prompt_token_ids"], SamplingParams(temperature=0.0), 8)
        serving.place(sequence, 1)
        serving.run([sequence])
        answers.append(sequence.outputs)
    assert answers[0] == answers[1]


def test_gguf_without_its_mtp_layers_is_read(tmp_path: Path) -> None:
    """The file counts layers that it does not have."""
    config = VARIANTS["glm4_moe head norms, groups"]["config"]
    write_checkpoint(tmp_path, config | {"num_nextn_predict_layers": 1})
    write_gguf(tmp_path / "trunk.gguf", tmp_path, as_type("F32"), **PLAIN)
    path = resolve_model(str(tmp_path / "trunk.gguf"))
    assert (ModelConfig.read(path).num_layers, ModelConfig.read(path).num_draft_layers) == (2, 0)
    checkpoint_of(path)


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_vl flat and old, one KV head",
        "qwen2_5_vl flat and old, tied, heads of 80, windows with a rest",
        "qwen3_vl three inner layers, the last one too, heads of 72, biases, untied",
        "qwen3_vl_moe a dense layer",
        "qwen3_5 recurrent layers before and after, tied",
        "qwen3_5_moe",
        "mistral3 of ministral3, nine patches a token, tied, silu",
    ],
)
def test_text_model_of_a_vision_gguf_is_served(name: str, tmp_path: Path) -> None:
    """The answers about text are those of the whole model."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": ADDED_TOKENS}))
    write_checkpoint(tmp_path, SEEING[name]["config"])
    write_gguf(tmp_path / "text.gguf", tmp_path, as_type("F32"), **PLAIN)
    path = resolve_model(str(tmp_path / "text.gguf"))
    config = ModelConfig.read(path)
    assert (config.vision, config.lacks_encoder, config.unknown_options) == (None, True, {})
    answers = []
    for place in (path, tmp_path):
        serving = Serving(make_runner(place, max_model_len=128, num_kv_blocks=40))
        sequence = ServedSequence(list(range(8, 60)), SamplingParams(temperature=0.0, num_logprobs=2), 8)
        serving.place(sequence, 1)
        serving.run([sequence])
        answers.append(sequence)
    assert answers[0].outputs == answers[1].outputs
    np.testing.assert_allclose(answers[0].logprobs, answers[1].logprobs, atol=1e-5)  # decays are stored as exponentials


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_gguf(path, DEMO, as_type("F32"), **original_metadata(DEMO))
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q_norm.weight", b"blk.0.attn_x_norm.weight"))
    with pytest.raises(
        CheckpointError, match=r"q_norm\.weight \[32\] is missing; blk\.0\.attn_x_norm\.weight .* is unexpected"
    ):
        checkpoint_of(resolve_model(str(path)))


def test_replaced_gguf_file_is_checked(tmp_path: Path) -> None:
    """The directory was made from the earlier file; the present contents of the file count. The same model with other values is
    accepted."""
    path = tmp_path / "tiny.gguf"
    source = tmp_path / "source"

    def write(theta: float, factor: float) -> None:
        config = write_config(source, {**TINY, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}})
        tensors = {name: values * np.float32(factor) for name, values in drawn_tensors(config).items()}
        write_safetensors(source / "model.safetensors", tensors)
        write_gguf(path, source, as_type("F32"), **PLAIN)

    write(10000.0, 1.0)
    directory = resolve_model(str(path))
    config = ModelConfig.read(directory)
    write(10000.0, 1.5)
    load_model(directory, config, TABLE, 16, lambda done, total: None)
    write(500000.0, 1.0)
    with pytest.raises(CheckpointError, match=r"not the model that the engine was started with .*rope: .*10000\.0.*500000\.0"):
        load_model(directory, config, TABLE, 16, lambda done, total: None)


def test_missing_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_gguf(path, DEMO, as_type("F16"), **original_metadata(DEMO))
    directory = resolve_model(str(path))
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint_of(directory)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
