"""Reading of adapters, and refusals with a cause before any of one is served."""

from __future__ import annotations

import gc
import json
import math
import os
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from tests.adapters import TARGETS, write_adapter
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_config, write_safetensors
from tests.workers.variants import check_features
from workers.extensions.adapters.reader import AdapterFiles
from workers.weights.safetensors import SafetensorsFile

MODEL = GOLDEN / "qwen3"
LAYOUT = AdapterLayout.of(ModelConfig.read(MODEL), 2, 16)
FIRST = "model.layers.0.self_attn.q_proj"
MODULE = next(module for module in LAYOUT.modules if module.name == FIRST)
IN = MODULE.num_inputs


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {
        name: np.array(each.read()) for name, each in SafetensorsFile(directory / "adapter_model.safetensors").tensors.items()
    }


def scales_of(directory: Path) -> dict[str, float]:
    """Return the factor of B for each module."""
    stored = tensors_of(directory)
    return {
        each.module.name: float(np.median(each.b / stored[f"base_model.model.{each.module.name}.lora_B.weight"]))
        for each in AdapterFiles(directory, LAYOUT).linears()
    }


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        list(AdapterFiles(directory, LAYOUT).linears())
    return str(caught.value)


def test_every_adapted_linear_is_read(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, MODEL, rank=6)
    stored, found = tensors_of(adapter), {each.module.name: each for each in AdapterFiles(adapter, LAYOUT).linears()}
    assert set(found) == {module.name for module in LAYOUT.modules}
    np.testing.assert_array_equal(found[FIRST].a, stored[f"base_model.model.{FIRST}.lora_A.weight"])
    np.testing.assert_array_equal(found[FIRST].b, 2 * stored[f"base_model.model.{FIRST}.lora_B.weight"])


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 12}, 2.0),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / math.sqrt(6)),
        ({"lora_alpha": 3, "alpha_pattern": {"q_proj": 30}}, 5.0),
        ({"lora_alpha": 3, "alpha_pattern": {"model.layers.0.self_attn.q_proj": 30}}, 5.0),
        ({"lora_alpha": 3, "alpha_pattern": {r"layers\.\d+\.self_attn\.(q|k)_proj": 30}}, 5.0),
        ({"lora_alpha": 3, "alpha_pattern": {"1.self_attn.q_proj": 30, "proj": 30}}, 0.5),
        ({"lora_alpha": 4, "rank_pattern": {"q_proj": 2}}, 2.0),
        ({"lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "use_rslora": True}, 4 / math.sqrt(2)),
    ],
)
def test_scale_follows_the_config(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, MODEL, rank=6, **config)
    assert scales_of(adapter)[FIRST] == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("dtype", ["F32", "F16", "F64", "BF16"])
@pytest.mark.parametrize("spelling", ["base_model.model.{}.lora_{}.default.weight", "{}.lora_{}.weight"])
def test_alternative_names_and_dtypes_are_read(dtype: str, spelling: str, tmp_path: Path) -> None:
    stored = tensors_of(write_adapter(tmp_path, MODEL, rank=4))
    renamed = {}
    for name, values in stored.items():
        module, _, part = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        renamed[spelling.format(module.replace("model.", "model.language_model."), part)] = values
    write_safetensors(tmp_path / "adapter_model.safetensors", renamed, dtype=dtype)
    found = {each.module.name: each for each in AdapterFiles(tmp_path, LAYOUT).linears()}
    np.testing.assert_allclose(found[FIRST].a, stored[f"base_model.model.{FIRST}.lora_A.weight"], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(self_attn|mlp)\.\w+_proj"},
        {"target_modules": r"(?!.*visual)(((a|b)+)+)?.*"},  # not tried: it might take long
        {"exclude_modules": ["lm_head"]},
        {"fan_in_fan_out": True, "lora_dropout": 0.1, "init_lora_weights": True, "modules_to_save": None, "megatron_core": "x"},
    ],
)
def test_supported_configs_are_accepted(config: dict[str, Any], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, MODEL, **config)
    assert len(list(AdapterFiles(adapter, LAYOUT).linears())) == len(LAYOUT.modules)


def test_layers_to_transform_limits_the_layers(tmp_path: Path) -> None:
    others = {f"base_model.model.{each.name}.lora_{part}.weight": None for each in LAYOUT.modules for part in "AB"}
    of_second = {name: change for name, change in others.items() if "layers.1." not in name}
    adapter = write_adapter(tmp_path, MODEL, changes=of_second, layers_to_transform=[1])
    assert {each.module.name.split(".")[2] for each in AdapterFiles(adapter, LAYOUT).linears()} == {"1"}
    write_adapter(tmp_path, MODEL, layers_to_transform=1)
    assert "model.layers.0.self_attn.q_proj is not in the target_modules" in refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: replacing modules"),
        ({"bias": "all"}, "bias: 'all' trains biases"),
        ({"lora_bias": True}, "lora_bias: biases of LoRA B"),
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' also changes weights of the base"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: replacing embedding rows"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "is no linear or experts with tensors"),
        ({"r": 0}, "r: 0 should be an integer of at least 1"),
        ({"r": 10**9}, "r: 1000000000 should be an integer of at most 512"),
        ({"r": None}, "r: is missing"),
        ({"lora_alpha": "x"}, "lora_alpha: 'x' should be a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha: nan should be a finite number"),
        ({"target_modules": 3}, "target_modules: 3 should be a list"),
        ({"target_modules": ["q_proj"]}, "is not in the target_modules"),
        ({"target_modules": [*TARGETS, "lm_head"], "exclude_modules": ["k_proj"]}, "k_proj is not in the target_modules"),
        ({"rank_pattern": {"q_proj": 17}, "r": 8}, "has rank 17, the limit is 16; start with --max-lora-rank 17"),
        ({"r": 4}, f"lora_A.weight has shape [8, {IN}], expected [4, {IN}]"),
        ({"alpha_pattern": {"(a+)+": 3}}, "pattern '(a+)+' is invalid or too complex"),
        ({"alpha_pattern": {"(a|b)(a|b)(a|b)": 3}}, "too complex"),
        ({"rank_pattern": {f"(a|b){index}": 8 for index in range(33)}}, "33 regular expressions, the limit is 32"),
        ({"alpha_pattern": {f"{index:0>100}": 8 for index in range(700)}}, "the patterns have more than 65536 characters"),
        ({"rank_pattern": {"[": 3}}, "pattern '[' is invalid"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern.q_proj: '8' should be an integer"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform: ['0'] should be a list of integers"),
    ],
)
def test_unsupported_configs_are_refused(config: dict[str, Any], cause: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, MODEL, rank=8, size=0.1)
    values = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(values | config))
    assert cause in refused(adapter)


A, B = (f"base_model.model.{FIRST}.lora_{part}.weight" for part in "AB")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight": np.ones((8, 4))},
            "matches no linear layer of the model",
        ),
        (
            {"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight": np.ones((8, 4))},
            "experts.3.up_proj.lora_A.weight matches no linear of the model's experts; merge the adapter into the model",
        ),
        ({"base_model.model.lm_head.lora_A.weight": np.ones((8, 4))}, "belongs to the embedding or the head"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((8, 4))}, "adapts an embedding"),
        ({f"base_model.model.{FIRST}.lora_magnitude_vector": np.ones(4)}, "is a magnitude of DoRA"),
        ({f"base_model.model.{FIRST}.lora_B.bias": np.ones(4)}, "is a bias of an adapter"),
        ({f"base_model.model.{FIRST}.bias": np.ones(4)}, "is a bias, which is not supported"),
        ({"base_model.model.lm_head.modules_to_save.default.weight": np.ones((8, 4))}, "replaces a module of the base model"),
        ({f"{FIRST}.lora_A.weight": np.ones((8, IN))}, "is stored twice"),
        ({A: None}, f"{FIRST} has no lora_A"),
        ({B: None}, f"{FIRST} has no lora_B"),
        ({A: None, B: None}, f"{FIRST} is adapted according to adapter_config.json, but has no tensors"),
        ({A: np.ones((8, IN - 1))}, f"has shape [8, {IN - 1}], expected [8, {IN}]"),
        ({A: np.ones((7, IN))}, f"has shape [7, {IN}], expected [8, {IN}]"),
        ({A: np.ones((8, IN // 8, 8))}, f"has shape [8, {IN // 8}, 8]"),
        ({A: np.ones(8 * IN)}, f"has shape [{8 * IN}]"),
        ({A: np.full((8, IN), np.nan)}, "lora_A.weight has a value that is not finite"),
        ({B: np.full((MODULE.num_outputs, 8), 3e38)}, "lora_B.weight has a value that is not finite"),  # with its scale
    ],
)
def test_unsupported_tensors_are_refused(changes: dict[str, np.ndarray | None], cause: str, tmp_path: Path) -> None:
    text = refused(write_adapter(tmp_path, MODEL, rank=8, changes=changes))
    assert cause in text, text


def file_of(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "too few for a header"),
        (b"123", "too few for a header"),
        (struct.pack("<Q", 1 << 62) + b"{}", "its header is longer than"),
        (struct.pack("<Q", 100) + b"{}", "is truncated or damaged"),
        (file_of(b"[" * 100_000), "is truncated or damaged"),
        (file_of(b"[]"), "its header is not a JSON object"),
        (file_of(b"{}"), "has no tensors of an adapter"),
        (file_of(b'{"a": 3}'), "header entry of a is malformed"),
        (file_of(json.dumps({A: {"dtype": "F32", "shape": [8, 128], "data_offsets": [0, 4096]}}).encode()), "damaged"),
        (
            file_of(json.dumps({A: {"dtype": "F32", "shape": [-8, -128], "data_offsets": [0, 4096]}}).encode(), bytes(4096)),
            "damaged",
        ),
        (file_of(json.dumps({A: {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}).encode()), "damaged"),
        (file_of(json.dumps({A: {"dtype": "Q9", "shape": [1], "data_offsets": [0, 1]}}).encode(), bytes(1)), "has dtype Q9"),
    ],
)
def test_damaged_files_are_refused(content: bytes, cause: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    text = refused(tmp_path)
    assert cause in text, text


def test_hostile_files_cost_little(tmp_path: Path) -> None:
    """Each of these once blocked a rank, and all its streams, for minutes, or ended it."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    shape = ",".join(["9" * 4000] * 900)
    headers = {
        "characters": json.dumps({"lora_A" * 100_000: entry}),  # a search for a bias after each of them
        "is malformed": f'{{"a": {{"dtype": "F32", "shape": [{shape}], "data_offsets": [0, 0]}}}}',
        "entry of a is malformed": '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 0]}}',
        "has dtype DDD": json.dumps({"a": {**entry, "dtype": "D" * 100_000}}),
        "matches no linear": json.dumps({"a\ud800": entry}),
    }
    write_adapter(tmp_path, MODEL)
    for cause, header in headers.items():
        (tmp_path / "adapter_model.safetensors").write_bytes(file_of(header.encode()))
        text = refused(tmp_path)
        assert cause in text
        assert len(text.encode()) < 1000
    write_adapter(tmp_path, MODEL, peft_type="\ud800" + "x" * 100_000)
    assert len(refused(tmp_path).encode()) < 10_000


def test_memory_of_a_read_adapter_is_freed(tmp_path: Path) -> None:
    """No garbage collection is needed: adapters are large, and a rank collects seldom."""
    files = AdapterFiles(write_adapter(tmp_path, MODEL), LAYOUT)
    assert len(list(files.linears())) == len(LAYOUT.modules)
    whole = weakref.ref(files._file)
    gc.disable()
    try:
        del files
        assert whole() is None
    finally:
        gc.enable()


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL, rank=8)
    entries, data = {}, b""
    for part, shape in (("A", [8, IN]), ("B", [MODULE.num_outputs, 8])):
        size = math.prod(shape)
        entries[f"base_model.model.{FIRST}.lora_{part}.weight"] = {
            "dtype": "I8",
            "shape": shape,
            "data_offsets": [len(data), len(data) + size],
        }
        data += bytes(size)
    (tmp_path / "adapter_model.safetensors").write_bytes(file_of(json.dumps(entries).encode(), data))
    assert "has dtype I8, expected floats" in refused(tmp_path)


def test_missing_or_irregular_files_are_refused(tmp_path: Path) -> None:
    assert "is not a directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "adapter_config.json is missing; expected an adapter directory" in refused(tmp_path / "empty")
    adapter = write_adapter(tmp_path / "adapter", MODEL)
    tensors = adapter / "adapter_model.safetensors"
    tensors.rename(adapter / "adapter_model.bin")
    assert "only adapter_model.bin exists; save the adapter as safetensors" in refused(adapter)
    os.mkfifo(tensors)
    assert "not a regular file" in refused(adapter) or "cannot be read" in refused(adapter)
    tensors.unlink()
    with open(tensors, "wb") as stream:
        stream.truncate(1 << 40)
    assert "bytes, the limit for rank 16 is" in refused(adapter)


def test_file_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    """Its copy would end the rank, and all its streams: files of experts have many GiB."""
    adapter = write_adapter(tmp_path, MODEL)
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert list(AdapterFiles(adapter, LAYOUT, size).linears())
    with pytest.raises(CheckpointError, match=r"has .* KiB, which are read into memory, but .* are available; unload"):
        AdapterFiles(adapter, LAYOUT, size - 1)


def test_joined_projections_are_read_by_their_parts(tmp_path: Path) -> None:
    """Queries and their gates are one linear in files, and the gates of MLPs another one."""
    write_config(tmp_path, check_features.configs()["qwen3_next"])
    layout = AdapterLayout.of(ModelConfig.read(tmp_path), 1, 16)
    model = "model.layers.3.self_attn"

    def found_in(adapter: Path) -> dict[str, np.ndarray]:
        return {each.module.name: each.b for each in AdapterFiles(adapter, layout).linears()}

    adapter = write_adapter(tmp_path / "queries", tmp_path, targets=("q_proj", "in_proj_qkvz", "in_proj_ba"))
    parts, whole = found_in(adapter), 2 * tensors_of(adapter)[f"base_model.model.{model}.q_proj.lora_B.weight"]
    by_head = whole.reshape(4, 2, 16, -1)
    np.testing.assert_array_equal(parts[f"{model}.q_proj"], by_head[:, 0].reshape(64, -1))
    np.testing.assert_array_equal(parts[f"{model}.gate_proj"], by_head[:, 1].reshape(64, -1))
    assert {f"in_proj_{part}" for part in ("qkv", "z", "b", "a")} < {name.rpartition(".")[2] for name in parts}

    of_mlp = found_in(write_adapter(tmp_path / "gates", tmp_path, targets=("gate_proj",)))
    assert of_mlp
    assert all(".mlp." in name for name in of_mlp)

    missing = {"base_model.model.model.layers.0.linear_attn.in_proj_ba.lora_A.weight": None}
    lacking = write_adapter(tmp_path / "lacking", tmp_path, targets=("in_proj_ba",), changes=missing)
    with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\.in_proj_ba has no lora_A"):
        found_in(lacking)
    missing |= {"base_model.model.model.layers.0.linear_attn.in_proj_ba.lora_B.weight": None}
    lacking = write_adapter(tmp_path / "lacking", tmp_path, targets=("in_proj_ba",), changes=missing)
    with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\.in_proj_ba is adapted according to"):
        found_in(lacking)


def test_layouts_of_models_with_experts() -> None:
    layout = AdapterLayout.of(ModelConfig.read(GOLDEN / "qwen3_moe"), 1, 16)
    names = {module.name.split(".", 3)[3] for module in layout.modules}
    experts = {f"mlp.experts.{index}.{each}_proj" for index in range(8) for each in ("gate", "up", "down")}
    assert names == {*(f"self_attn.{each}_proj" for each in "qkvo"), "mlp.gate", *experts}
    layout = AdapterLayout.of(ModelConfig.read(GOLDEN / "deepseek_v3"), 1, 16)
    names = {module.name.split(".", 3)[3] for module in layout.modules if ".experts." not in module.name}
    assert names == {
        *(f"self_attn.{each}" for each in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
        *(f"mlp.{prefix}{each}_proj" for prefix in ("", "shared_experts.") for each in ("gate", "up", "down")),
        "mlp.gate",
    }
