"""Quantized checkpoints: the weights of the embedded model's first layers, stored in each format, are read as exactly the
values that they represent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from engine.messages import SamplingParams
from tests.workers.serving import ServedSequence, Serving, make_runner
from tests.workers.weights.formats.quantizers import (
    DEMO,
    FORMATS,
    Format,
    Quantized,
    awq,
    blocks_of_4_bits,
    compressed,
    e4m3_value,
    float4,
    float8,
    fp8_blocks,
    gptq,
    hqq,
    int_quantized,
    llm_int8,
    pack_quantized,
    torchao,
    torchao_blocks,
    write_quantized_demo,
    write_tensors,
)
from workers.models import declare_model
from workers.weights.formats.float8 import e4m3
from workers.weights.reader import Checkpoint
from workers.weights.safetensors import SafetensorsFile


def checkpoint_of(path: Path) -> Checkpoint:
    config = ModelConfig.read(path)
    _, weights = declare_model(config)
    return Checkpoint(path, config, weights)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_are_exact(name: str, tmp_path: Path) -> None:
    expected = write_quantized_demo(tmp_path, FORMATS[name](), num_layers=2)
    checkpoint = checkpoint_of(tmp_path)
    for tensor_name, values in expected.items():
        found = checkpoint.read(tensor_name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values, err_msg=tensor_name)


@pytest.mark.parametrize("name", FORMATS)
def test_invalid_scales_are_refused(name: str, tmp_path: Path) -> None:
    """Whether they are kept as integers or not; the tensor is named."""
    format = FORMATS[name]()

    def quantize(weight: np.ndarray) -> Quantized:
        found = format.quantize(weight)
        for suffix, values in found.stored.items():
            if values.dtype.kind == "f" and ("scale" in suffix or suffix.endswith(("absmax", "SCB"))):
                values.flat[-1] = np.nan
            elif ("mxfp4" in name or "exponents" in name or "e8m0" in name) and suffix.removeprefix("_").startswith(
                "weight_scale"
            ):
                values.view(np.uint8)[-32:] = 255  # the last row of a tile may be padding
        return found

    write_quantized_demo(tmp_path, replace(format, quantize=quantize), num_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.\d\.\w+\.\w+_proj\.weight are NaN or infinite"):
        make_runner(tmp_path)


@pytest.mark.parametrize("name", ["mxfp4", "torchao int8", "nvfp4"])
def test_too_large_scales_are_refused(name: str, tmp_path: Path) -> None:
    """Scales that are finite but have products that are not, or a common scale that makes every weight 0."""
    format = FORMATS[name]()

    def quantize(weight: np.ndarray) -> Quantized:
        found = format.quantize(weight)
        if name == "mxfp4":
            found.stored["weight_scale"].view(np.uint8).flat[0] = 254
        elif name == "nvfp4":
            found.stored["weight_global_scale"][:] = np.inf
        else:
            found.stored["_weight_scale"].flat[0] = 3e38
        return found

    write_quantized_demo(tmp_path, replace(format, quantize=quantize), num_layers=1)
    with pytest.raises(CheckpointError, match=r"are NaN or infinite|weight_global_scale is inf"):
        make_runner(tmp_path)


def test_older_gptq_config_is_read(tmp_path: Path) -> None:
    """A separate file, without the method's name."""
    expected = write_quantized_demo(tmp_path, gptq(4, 64))
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    del quantization["quant_method"], quantization["checkpoint_format"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(quantization))
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(checkpoint_of(tmp_path).read(name), expected[name])


def test_groups_are_chosen_by_target(tmp_path: Path) -> None:
    """The group that names a module precedes the general one, and may have another format."""
    four, eight = pack_quantized(4, 32), int_quantized(-1)
    general, special = four.config["config_groups"]["group_0"], eight.config["config_groups"]["group_0"]
    groups = {"group_0": general, "group_1": {**special, "targets": ["re:.*self_attn.*"], "format": "int-quantized"}}

    def quantize(weight: np.ndarray) -> Quantized:
        return (four if 384 in weight.shape else eight).quantize(weight)

    expected = write_quantized_demo(tmp_path, Format(quantize, {**four.config, "config_groups": groups}))
    checkpoint = checkpoint_of(tmp_path)
    for part in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"model.layers.3.{part}.weight"
        np.testing.assert_array_equal(checkpoint.read(name), expected[name])


def test_e4m3_values_decode_exactly() -> None:
    codes = np.arange(256, dtype=np.uint8)
    is_number = codes & 127 != 127
    assert e4m3(codes[is_number]).tolist() == [e4m3_value(int(code)) for code in codes[is_number]]
    assert np.isnan(e4m3(codes[~is_number])).all()
    assert e4m3(np.array([0x7E, 0x01, 0x08], np.uint8)).tolist() == [448, 2**-9, 2**-6]


@pytest.mark.slow
@pytest.mark.parametrize("format", [pack_quantized(8, 32), fp8_blocks()], ids=["packed 8", "fp8 blocks"])
def test_quantized_checkpoint_equals_float_weights(format: Format, tmp_path: Path) -> None:
    """The answers equal those of the same weights stored as float32, where both become float32."""
    worth = write_quantized_demo(tmp_path / "quantized", format)
    write_quantized_demo(tmp_path / "plain", Format(format.quantize, {}))
    write_tensors(tmp_path / "plain" / "model.safetensors", worth)
    answers = []
    for path in (tmp_path / "quantized", tmp_path / "plain", DEMO):
        serving = Serving(make_runner(path, ops="reference", plan="eager"))
        sequence = ServedSequence(list(range(3, 40)), SamplingParams(temperature=0.0, num_logprobs=2))
        serving.place(sequence, 0)
        serving.run([sequence])
        answers.append(sequence.answer())
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]  # rounded


# ----------------------------------------------------------------------------------------------------------- refused

NF4, NF4_STATE = blocks_of_4_bits("nf4", is_nested=True), "weight.quant_state.bitsandbytes__nf4"
AO, MX, HQQ = torchao("Int8Tensor", 8, -1), torchao_blocks("MXTensor", is_swizzled=True), hqq(4, 64)
AWQ, GPTQ, PACKED, FP8 = awq(32), gptq(4, 32), pack_quantized(4, 32), fp8_blocks()


def with_weights(**changes: Any) -> dict[str, Any]:
    group = PACKED.config["config_groups"]["group_0"]
    return {**PACKED.config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"bits": 4, "group_size": 64},
            r"quant_method: 'mlx' is not supported; expected one of .*awq, .*serve the unquantized",
        ),
        (
            {"quant_method": "quanto"},
            r"quant_method: 'quanto' is not supported; expected one of .*awq, .*serve the unquantized",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "quant_type: 'int4_weight_only' is the notation of older versions, which stored pickles; save the model again",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_data": {"int4_packing_format": "tile_packed_to_4d"}}}},
            "quant_type: int4_packing_format is 'TILE_PACKED_TO_4D', a layout for one device, .*quantize with 'PLAIN'",
        ),
        (
            {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {"scale_quant_params": {"nbits": 8}}}},
            "quant_config: scale_quant_params is set; quantized scales and zero points are not supported",
        ),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit: either load_in_4bit or load_in_8bit should be true"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            "bnb_4bit_quant_storage: 'bfloat16' is not supported; supported: 'uint8'",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo: 'W4A8_AWQ' is not supported; supported: 'FP8', 'MXFP8', 'NVFP4'",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:llm_compressor"},
            "packing_format: 'auto_round:llm_compressor' is not supported; supported: 'auto_round:auto_gptq'",
        ),
        ({"bits": 4}, "quantization_config.quant_method: is missing"),
        ({**AWQ.config, "bits": 3}, "bits: 3 is not supported; supported: 4"),
        ({**AWQ.config, "version": "GEMV"}, "version: 'gemv' is not supported; supported: 'gemm'"),
        ({**AWQ.config, "group_size": 0}, "group_size: 0 is not supported"),
        ({**GPTQ.config, "bits": 5}, "bits: 5 is not supported; supported: 2, 3, 4, 8"),
        ({**GPTQ.config, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported"),
        ({**GPTQ.config, "dynamic": {"+:.*mlp.*": {"bits": 8}}}, "dynamic: .* sets its own bits or group size"),
        ({**FP8.config, "fmt": "e5m2"}, "fmt: 'e5m2' is not supported; supported: 'e4m3'"),
        ({**FP8.config, "scale_fmt": "e5m3"}, "scale_fmt: 'e5m3' is not supported; supported: 'float', 'ue8m0'"),
        ({**FP8.config, "expert_dtype": "fp4"}, "expert_dtype: 'fp4' is not supported; supported: 'fp8'"),
        ({**FP8.config, "weight_block_size": [128]}, "weight_block_size: .* should be two positive integers"),
        ({**PACKED.config, "format": "marlin-24"}, "format: 'marlin-24' is not supported; supported: 'pack-quantized'"),
        ({**PACKED.config, "config_groups": {}}, "config_groups: is empty"),
        ({**PACKED.config, "ignore": ["lm_head", "re:*mlp"]}, r"ignore: 're:\*mlp' is no regular expression \(nothing to"),
        (
            {**PACKED.config, "config_groups": {"group_0": {**PACKED.config["config_groups"]["group_0"], "targets": ["re:("]}}},
            r"config_groups\.group_0\.targets: 're:\(' is no regular expression",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "extra_config": {"*.mlp": {"bits": 8}}},
            r"extra_config: 're:\*\.mlp' is no regular expression",
        ),
        ({**PACKED.config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        ({**PACKED.config, "transform_config": {"a": 1}}, "transform_config"),
        (with_weights(num_bits=3), r"config_groups\.group_0\.weights\.num_bits: 3 is not supported; supported: 4, 8"),
        (with_weights(type="float"), "weights.type: 'float' is not supported"),
        (with_weights(strategy="token"), "weights.strategy: 'token' is not supported"),
        (with_weights(dynamic=True), "weights.dynamic: True is not supported"),
    ],
)
def test_unsupported_config_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The configuration is refused before any weight is opened."""
    values = json.loads((DEMO / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(tmp_path)


def _stored_with(change: Callable[[dict[str, np.ndarray]], object], format: Format) -> Format:
    def quantize(weight: np.ndarray) -> Quantized:
        found = format.quantize(weight)
        change(found.stored)
        return found

    return Format(quantize, format.config, format.plain)


def _described(format: Format, text: str) -> Format:
    """Return `format` with another entry in the metadata."""
    return Format(lambda weight: replace(format.quantize(weight), description=text), format.config)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (_stored_with(lambda stored: stored.pop("qzeros"), AWQ), "qzeros is missing; the checkpoint has qweight, scales"),
        (
            _stored_with(lambda stored: stored.update(scales=stored["scales"][1:]), AWQ),
            r"scales has shape \[11, 128\], expected \[12, 128\]",
        ),
        (
            _stored_with(lambda stored: stored.update(qweight=stored["qweight"].astype(np.int64)), AWQ),
            "dtype I64, expected I32",
        ),
        (_stored_with(lambda stored: stored.pop("g_idx"), gptq(4, 32, has_order=True)), "g_idx is missing"),
        (_stored_with(lambda stored: stored.update(bias=stored["bias"] + 1), GPTQ), r"q_proj\.bias \[128\] is unexpected"),
        (_stored_with(lambda stored: stored.pop("weight_shape"), PACKED), "weight_shape is missing"),
        (
            _stored_with(lambda stored: stored.update(weight_shape=np.array([9, 9])), PACKED),
            r"does not fit a weight \[9, 9\]",
        ),
        (_stored_with(lambda stored: stored.pop("weight_scale_inv"), FP8), "weight_scale is missing"),
        (_stored_with(lambda stored: stored.pop("weight.quant_map"), NF4), r"weight\.quant_map is missing"),
        (_stored_with(lambda stored: stored.pop("weight.nested_absmax"), NF4), r"weight\.nested_absmax is missing"),
        (_stored_with(lambda stored: stored.pop(NF4_STATE), NF4), r"quant_state\.bitsandbytes__nf4 is missing"),
        (_stored_with(lambda stored: stored.update({NF4_STATE: np.zeros(4, "V1")}), NF4), "bitsandbytes__nf4 cannot be read"),
        (
            _stored_with(
                lambda stored: stored.update({NF4_STATE: np.frombuffer(b'{"shape":[0,1],"blocksize":64}', "V1")}), NF4
            ),
            r"has shape \[0, 1\] and blocks of 64; expected positive sizes",
        ),
        (_described(AO, ""), "the file's metadata does not describe its weight; save the model again with transformers"),
        (
            _described(AO, '{"_type": "Int4PreshuffledTensor", "_data": {}}'),
            "Int4PreshuffledTensor is not supported, .*supported are Int8Tensor",
        ),
        (
            _described(MX, '{"_type": "MXTensor", "_data": {"elem_dtype": "fp6_e2m3"}}'),
            "elem_dtype 'fp6_e2m3' of MXTensor is not supported; supported are float4_e2m1fn_x2, float8_e4m3fn",
        ),
        (
            _described(MX, '{"_type": "MXTensor", "_data": {"elem_dtype": "float4_e2m1fn_x2", "block_size": 3}}'),
            "block_size 3 should be an even number",
        ),
        (
            _described(MX, '{"_type": "MXTensor", "_data": {"elem_dtype": "float4_e2m1fn_x2", "block_size": 10}}'),
            "inputs are not whole blocks of 10",
        ),
        (
            _stored_with(lambda stored: stored.update(_weight_scale=stored["_weight_scale"][1:]), MX),
            r"_weight_scale has shape \[31, \d+\], expected \[32, \d+\]",
        ),
        (
            _described(AO, '{"_type": "Int8Tensor", "_data": {"block_size": [1, 0]}}'),
            r"block_size \[1, 0\] should be positive integers",
        ),
        (
            _stored_with(lambda stored: stored.update(_weight_scale=stored["_weight_scale"][1:]), AO),
            r"_weight_scale has \[127, 1\] scales, expected \[128, 1\] for block_size \[1, \d+\] of a weight",
        ),
        (_stored_with(lambda stored: stored.pop("packing"), HQQ), "packing is missing"),
        (_stored_with(lambda stored: stored.update(axis=np.array(2, np.int32)), HQQ), "axis 2 and shape .* are not supported"),
        (
            _stored_with(lambda stored: stored.update(scale=stored["scale"][1:]), HQQ),
            r"scale has shape \[\d+, 1\], which does not fit a weight",
        ),
        (
            _stored_with(lambda stored: stored.update(W_q=stored["W_q"][1:]), HQQ),
            r"W_q has \d+ bytes, which does not fit 4bit_u8",
        ),
        (
            _stored_with(lambda stored: stored.update(quant_zero=np.ones((), np.uint8).view("V1")), HQQ),
            "quant_zero is set, but quantized scales and zero points are not supported",
        ),
        (_stored_with(lambda stored: stored.pop("SCB"), llm_int8()), "SCB is missing"),
        (_stored_with(lambda stored: stored.pop("weight_scale_2"), float4("modelopt")), "weight_scale_2 is missing"),
        (_stored_with(lambda stored: stored.update(qweight=stored["qweight"][:4]), gptq(3, 32)), "not whole words of 3 bits"),
        (Format(AWQ.quantize, {**AWQ.config, "modules_to_not_convert": ["mlp"]}), "mlp.* is stored quantized, but"),
        (Format(AWQ.quantize, {}), r"q_proj\.weight \[128, 128\] is missing"),
        (Format(float8(0, 0), {}), r"q_proj\.weight is quantized, but config\.json has no quantization_config"),
        (compressed("int-quantized", with_weights(num_bits=8)["config_groups"]["group_0"]["weights"], FP8.quantize), "F8_E4M3"),
    ],
)
def test_inconsistent_tensors_are_refused(format: Format, message: str, tmp_path: Path) -> None:
    write_quantized_demo(tmp_path, format, num_layers=1)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_of(tmp_path)


def test_group_index_out_of_range_is_refused(tmp_path: Path) -> None:
    format = _stored_with(lambda stored: stored["g_idx"].fill(99), gptq(4, 32, has_order=True))
    write_quantized_demo(tmp_path, format, num_layers=1)
    with pytest.raises(CheckpointError, match="g_idx has groups from 99 to 99"):
        checkpoint_of(tmp_path).read("model.layers.0.mlp.up_proj.weight")


def test_decoding_does_not_change_the_file(tmp_path: Path) -> None:
    """Decoding leaves the file's mapping unchanged."""
    write_quantized_demo(tmp_path, AWQ)
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint_of(tmp_path).read("model.layers.0.mlp.up_proj.weight")
    assert bytes(SafetensorsFile(tmp_path / "model.safetensors").data) == before
