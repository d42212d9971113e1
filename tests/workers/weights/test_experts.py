"""Experts from a checkpoint to the kernels: the packed values equal the stored ones of each expert, for every format and
layout, packed now or mapped from the cache.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.locate import resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from ops.cpu.packing import WEIGHT_KINDS, PackedWeight
from ops.cpu.table import TABLE
from ops.modules import Experts, Linear, Router
from ops.weight_format import WeightFormat, float32
from tests.ggufs import as_type, write_gguf
from tests.ops.packing import pack
from tests.ops.test_int_linear import unpacked
from tests.workers.checkpoints import TINY, drawn_tensors, to_paddle_layout, write_checkpoint, write_config, write_safetensors
from tests.workers.weights.formats.quantizers import FORMATS, e4m3_value, fp8_blocks, fp8_tensor, write_quantized, write_tensors
from workers.models import declare_model
from workers.models.loading import LoadedModel, load_model
from workers.models.mlp import Mixture
from workers.weights.cache import WeightCache
from workers.weights.loader import LoadOptions
from workers.weights.precision import Precision
from workers.weights.reader import Checkpoint

MOE: dict[str, Any] = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 128,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
ERNIE = {
    **TINY,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 12,
    "moe_num_shared_experts": 2,
    "torch_dtype": "float32",
    "head_dim": 10,
}
EXPERTS = "model.layers.1.mlp.experts"
PROJECTIONS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def load(path: Path, directory: Path | None = None, precision: Precision = Precision()) -> LoadedModel:  # noqa: B008
    cache = WeightCache(directory, 1 << 30) if directory else None
    return load_model(
        path, ModelConfig.read(path), TABLE, 16, lambda done, total: None, LoadOptions(precision=precision, cache=cache)
    )


def mixture_of(loaded: LoadedModel) -> tuple[Router, Experts]:
    layer: Any = loaded.model.layers[1]
    assert isinstance(layer.mlp, Mixture)
    return layer.mlp.router, layer.mlp.experts


def bytes_of(weight: PackedWeight) -> dict[str, np.ndarray]:
    parts = {name: getattr(weight, name) for name in ("values", "scales", "multipliers", "offsets")}
    return {name: part.owner.reshape(-1).view(np.uint8) for name, part in parts.items() if part is not None}


def assert_same(found: LoadedModel, expected: LoadedModel) -> None:
    for part in PROJECTIONS:
        pair = [bytes_of(getattr(mixture_of(loaded)[1].weight, part)) for loaded in (found, expected)]
        assert list(pair[0]) == list(pair[1])
        for name, values in pair[0].items():
            np.testing.assert_array_equal(values, pair[1][name])


def assert_packed(experts: Experts, tensors: dict[str, np.ndarray]) -> None:
    """Check that each expert is packed like a linear of its own, byte for byte."""
    for part, names in PROJECTIONS.items():
        whole, format = bytes_of(getattr(experts.weight, part)), getattr(experts, part)[0].format
        for index in range(experts.num_experts):
            weight = np.concatenate([tensors[f"{EXPERTS}.{index}.{name}.weight"] for name in names])
            alone = Linear(("w",), weight.shape[1], (len(weight),), format=format)
            pack(TABLE, alone, weight=weight)
            for name, values in bytes_of(alone.weight).items():
                np.testing.assert_array_equal(
                    np.split(whole[name], experts.num_experts)[index], values, err_msg=f"{part} {index}"
                )


PRECISIONS = [Precision(*each) for each in itertools.product(("float32", "bfloat16"), ("none", "wint8", "wint4"))]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_rounded_experts_keep_their_values(precision: Precision, tmp_path: Path) -> None:
    """Every precision, packed into memory, into a file, and mapped from it; the router is float32 in all."""
    tensors = drawn_tensors(write_checkpoint(tmp_path / "model", MOE))
    in_memory = load(tmp_path / "model", None, precision)
    router, experts = mixture_of(in_memory)
    kind = {"none": precision.dtype, "wint8": "int8", "wint4": "int4"}[precision.quantization]
    assert {linear.format.kind for part in experts.parts.values() for linear in part} == {kind}
    assert WEIGHT_KINDS[experts.weight.down.kind] == kind
    assert_packed(experts, tensors)
    x = np.random.default_rng(0).standard_normal((3, 128), np.float32)
    exact = x @ tensors["model.layers.1.mlp.gate.weight"].T
    np.testing.assert_allclose(TABLE.linear(x, router.linear).numpy(), exact, atol=1e-5)
    for outcome in ("miss", "hit"):
        found = load(tmp_path / "model", tmp_path / "cache", precision)
        assert found.cache == outcome
        assert found.num_bytes == in_memory.num_bytes
        assert_same(found, in_memory)


KEPT = {
    "awq, groups of 32": WeightFormat("int4", 32, True),
    "gptq 4": WeightFormat("int4", 64),
    "packed 4, asymmetric": WeightFormat("int4", 128, True),
    "packed 8": WeightFormat("int8", 128),
    "int8, channels": WeightFormat("int8", 0),
    "gptq 4, act-order": WeightFormat("float32"),
    "fp8 blocks": WeightFormat("float32"),
    "float8 channel": WeightFormat("float32"),
}


@pytest.mark.parametrize("name", KEPT)
def test_quantized_experts_keep_their_values(name: str, tmp_path: Path) -> None:
    """Values and scales of every expert equal the checkpoint's. Formats without a kernel become floats."""
    tensors = drawn_tensors(write_config(tmp_path, MOE))
    format = FORMATS[name]()
    format.config |= {"ignore": ["lm_head", "re:.*mlp.gate$"], "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    worth = write_quantized(tmp_path, MOE, tensors, format)
    _, experts = mixture_of(load(tmp_path))
    for part, projections in PROJECTIONS.items():
        linears = getattr(experts, part)
        assert {linear.format for linear in linears} <= {KEPT[name], WeightFormat(KEPT[name].kind, 0)}
        if KEPT[name].kind == "float32":
            continue
        packed = getattr(experts.weight, part)
        for index, linear in enumerate(linears):
            expected = np.concatenate([worth[f"{EXPERTS}.{index}.{projection}.weight"] for projection in projections])
            own = PackedWeight(
                packed.kind, *(slot_of(packed, index, each) for each in ("values", "scales", "multipliers", "offsets"))
            )
            found = unpacked(own, linear.format, linear.width, linear.num_inputs)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    if KEPT[name].kind == "float32":
        assert_packed(experts, worth)


class _Part:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values


def slot_of(packed: PackedWeight, index: int, name: str) -> Any:
    """Return one expert's part of an array."""
    array = getattr(packed, name)
    return None if array is None else _Part(np.split(array.numpy().reshape(-1), 5)[index])


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "BF16"])
def test_gguf_experts_are_read(type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts are one tensor there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = MOE | {"num_local_experts": 5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    write_checkpoint(tmp_path / "model", config)
    metadata = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"], "tokenizer__ggml__token_type": [1]}
    worth = write_gguf(tmp_path / "a.gguf", tmp_path / "model", as_type(type_name), **metadata)
    path = resolve_model(str(tmp_path / "a.gguf"))
    _, experts = mixture_of(load(path))
    expected = {
        f"{EXPERTS}.{index}.{name}.weight": worth[f"{EXPERTS}.{name}.weight"][index]
        for index in range(5)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    if type_name == "BF16":
        assert_packed(experts, expected)
        return
    for part, projections in PROJECTIONS.items():
        packed = getattr(experts.weight, part)
        for index, linear in enumerate(getattr(experts, part)):
            own = PackedWeight(
                packed.kind, *(slot_of(packed, index, each) for each in ("values", "scales", "multipliers", "offsets"))
            )
            exact = np.concatenate([expected[f"{EXPERTS}.{index}.{name}.weight"] for name in projections])
            np.testing.assert_array_equal(unpacked(own, linear.format, linear.width, linear.num_inputs), exact)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"qwen3moe__expert_gating_func": 2}, r"qwen3moe\.expert_gating_func: 2 is not supported; supported: 0, 1"),
        ({"qwen3moe__expert_weights_scale": 2.5}, r"expert_weights_scale: 2\.5 is not supported"),
        ({"qwen3moe__expert_used_count": 6}, "num_experts_per_tok: 6 experts per token, but only 5 exist"),
    ],
)
def test_inconsistent_gguf_metadata_is_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = MOE | {"num_local_experts": 5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    write_checkpoint(tmp_path / "model", config)
    metadata |= {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": ["a"], "tokenizer__ggml__token_type": [1]}
    write_gguf(tmp_path / "a.gguf", tmp_path / "model", as_type("F32"), **metadata)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(resolve_model(str(tmp_path / "a.gguf")))


@pytest.mark.parametrize("is_fused", [False, True])
def test_paddle_layout_is_read(is_fused: bool, tmp_path: Path) -> None:
    """Linears, including routers, are transposed, gate and up may be one tensor; the score correction is stored unchanged."""
    config = {key: value for key, value in ERNIE.items() if key != "transformers_version"}
    tensors = drawn_tensors(write_checkpoint(tmp_path / "plain", config))
    turned = to_paddle_layout(tensors)
    stored = {}
    for name, tensor in turned.items():
        name = name.replace("model.", "ernie.", 1)
        if "e_score_correction_bias" in name:
            tensor = np.ascontiguousarray(tensor.T)
        if is_fused and ".up_proj" in name:
            continue
        if is_fused and ".gate_proj" in name:
            up = turned[name.replace("ernie.", "model.", 1).replace("gate_proj", "up_proj")]
            name, tensor = name.replace("gate_proj", "up_gate_proj"), np.concatenate([tensor, up], axis=1)
        stored[name] = tensor
    stored["ernie.mtp_block.0.mlp.gate.weight"] = np.zeros((3, 3), np.float32)
    write_config(tmp_path / "paddle", config)
    write_safetensors(tmp_path / "paddle" / "model.safetensors", stored, metadata={"format": "pd"})
    plain, paddle = load(tmp_path / "plain"), load(tmp_path / "paddle")
    assert_same(paddle, plain)
    routers = [mixture_of(loaded)[0] for loaded in (paddle, plain)]
    for values in (lambda router: router.linear.weight.values.numpy(), lambda router: router.correction.numpy()):
        np.testing.assert_array_equal(*map(values, routers))


def test_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = drawn_tensors(write_config(tmp_path, MOE))
    del tensors[f"{EXPERTS}.3.up_proj.weight"]
    tensors[f"{EXPERTS}.5.up_proj.weight"] = np.ones((128, 128), np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    assert f"{EXPERTS}.3.up_proj.weight [128, 128] is missing" in str(raised.value)
    assert f"{EXPERTS}.5.up_proj.weight [128, 128] is unexpected" in str(raised.value)


def test_random_experts_depend_on_the_seed(tmp_path: Path) -> None:
    config = write_config(tmp_path, MOE)
    found = [
        load_model(tmp_path, config, TABLE, 16, lambda done, total: None, LoadOptions(random_seed=seed)) for seed in (1, 1, 2)
    ]
    assert_same(found[0], found[1])
    values = [mixture_of(loaded)[1].weight.down.values.numpy() for loaded in found]
    assert (values[0] != values[2]).any()
    assert len({part.tobytes() for part in np.split(values[0].reshape(-1), 5)}) == 5


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize(
    ("suffix", "block", "powers"),
    [
        *(("_scale_inv", 64, ""), ("_scale_inv", 0, ""), ("_weight_scale", 0, ""), ("_scale", None, "")),
        *(("_scale_inv", 64, "S1"), ("_weight_scale", 0, "V1")),
    ],
)
def test_stacked_experts_of_8_bit_floats_are_read(
    suffix: str, block: int | None, powers: str, is_turned: bool, tmp_path: Path
) -> None:
    """Scales of blocks; of gate and up, or of each expert; and one for all (None). Outputs first, or inputs. Powers of two may
    be exponents, with or without their type."""
    format = fp8_blocks(64, 64) if block else fp8_tensor()
    model = write_config(tmp_path, MOE | {"moe_intermediate_size": 192, "quantization_config": format.config})
    tensors = {name: tensor for name, tensor in drawn_tensors(model).items() if not name.startswith(EXPERTS)}
    generator, values_of = np.random.default_rng(0), np.array([e4m3_value(code) for code in range(256)], np.float32)
    worth: dict[str, np.ndarray] = {}
    for part, shape, names in (("gate_up", (384, 128), ("gate_proj", "up_proj")), ("down", (128, 192), ("down_proj",))):
        steps = (block, block) if block else (192 if suffix == "_scale_inv" and part == "gate_up" else shape[0], shape[1])
        grid = tuple(-(-size // step) for size, step in zip(shape, steps, strict=True))
        codes = generator.integers(0, 120, (5, *shape), np.uint8)
        scales = generator.uniform(0.001, 0.002, () if block is None else (5, *grid)).astype(np.float32)
        if powers:
            exponents = generator.integers(116, 119, (5, *grid), np.uint8)
            scales = np.exp2(exponents - np.float32(127))
        wide = np.broadcast_to(scales, (5, *grid)).repeat(steps[0], axis=1).repeat(steps[1], axis=2)
        values = values_of[codes] * wide[:, : shape[0], : shape[1]]
        for expert in range(5):
            halves = np.split(values[expert], len(names))
            worth |= {f"{EXPERTS}.{expert}.{name}.weight": half for name, half in zip(names, halves, strict=True)}
        if is_turned:
            codes, scales = codes.swapaxes(1, 2), scales.swapaxes(1, 2) if scales.ndim else scales
        if powers:
            scales = (np.log2(scales) + 127).astype(np.uint8).view(powers)
        tensors |= {f"{EXPERTS}.{part}_proj": codes, f"{EXPERTS}.{part}_proj{suffix}": scales}
    write_tensors(tmp_path / "model.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path, model, declare_model(model)[1])
    for name, expected in worth.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)
    load_model(tmp_path, model, TABLE, 16, lambda done, total: None)


@pytest.mark.parametrize(
    ("name", "prefix", "kept"),
    [
        ("packed 4", "_", "int4 32"),
        ("packed 8, asymmetric", "_", "int8 32"),
        ("torchao int8", "", "int8 0"),
        ("torchao int4", "", "int4 64"),
        ("torchao float8", "", "8-bit floats"),
        ("torchao mxfp4", "", "float4 32"),
    ],
)
def test_stacked_quantized_experts_are_kept(name: str, prefix: str, kept: str, tmp_path: Path) -> None:
    """Names are `gate_up_proj_packed` in compressed-tensors, `_gate_up_proj_qdata` in torchao."""
    format = FORMATS[name]()
    config = format.config | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    model = write_config(tmp_path, MOE | {"quantization_config": config})
    drawn = drawn_tensors(model)
    tensors = {key: tensor for key, tensor in drawn.items() if not key.startswith(EXPERTS)}
    worth, metadata = {}, {}
    for part, names in PROJECTIONS.items():
        matrices = [np.concatenate([drawn[f"{EXPERTS}.{index}.{each}.weight"] for each in names]) for index in range(5)]
        found = [format.quantize(matrix) for matrix in matrices]
        for suffix in found[0].stored.keys() - {"weight_shape"}:
            own = f"{part}_proj{suffix.removeprefix('weight')}" if prefix else suffix.replace("weight", f"{part}_proj")
            stacked = np.stack([each.stored[suffix] for each in found])
            tensors[f"{EXPERTS}.{own}"] = stacked
        metadata[f"{EXPERTS}.{part}_proj"] = found[0].description
        for index, each in enumerate(found):
            halves = zip(names, np.split(each.weight, len(names)), strict=True)
            worth |= {f"{EXPERTS}.{index}.{half}.weight": values for half, values in halves}
    write_tensors(tmp_path / "model.safetensors", tensors, metadata)
    checkpoint = Checkpoint(tmp_path, model, declare_model(model)[1])
    for tensor, expected in worth.items():
        np.testing.assert_array_equal(checkpoint.read(tensor), expected, err_msg=tensor)
        found_format = checkpoint.kept(tensor)
        if isinstance(found_format, WeightFormat):
            assert f"{found_format.kind} {found_format.group_size}" == kept
            values = float32(checkpoint.read_integers(tensor, found_format))
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
        else:
            assert found_format == kept
    load_model(tmp_path, model, TABLE, 16, lambda done, total: None)


def test_stacked_parts_of_other_counts_are_refused(tmp_path: Path) -> None:
    model = write_config(tmp_path, MOE | {"quantization_config": FORMATS["packed 4"]().config})
    tensors = {name: tensor for name, tensor in drawn_tensors(model).items() if not name.startswith(EXPERTS)}
    stacked = {"packed": np.zeros((5, 256, 16), np.int32), "scale": np.zeros((4, 256, 4), np.float32)}
    write_tensors(
        tmp_path / "model.safetensors", tensors | {f"{EXPERTS}.gate_up_proj_{name}": part for name, part in stacked.items()}
    )
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scale has shape \[4, 256, 4\], expected one matrix for each of 5"):
        load_model(tmp_path, model, TABLE, 16, lambda done, total: None)


@pytest.mark.parametrize("suffix", ["", ".weight", "_qweight"])
def test_quantized_experts_in_one_tensor_are_refused(suffix: str, tmp_path: Path) -> None:
    model = write_config(tmp_path, MOE | {"quantization_config": FORMATS["fp8 tensor"]().config})
    tensors = {name: tensor for name, tensor in drawn_tensors(model).items() if not name.startswith(EXPERTS)}
    write_tensors(
        tmp_path / "model.safetensors", tensors | {f"{EXPERTS}.gate_up_proj{suffix}": np.zeros((5, 256, 128), np.uint8)}
    )
    with pytest.raises(CheckpointError, match=rf"gate_up_proj{suffix} has the quantized experts of a layer in one tensor"):
        load_model(tmp_path, model, TABLE, 16, lambda done, total: None)
