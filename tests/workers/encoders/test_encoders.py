"""Encoders against transformers, and against themselves: alone, packed, split into slices, op by op; and their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from engine.messages.media import SLICE_ROWS
from tests.golden.make_units import MODELS, UNITS
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_safetensors
from tests.workers.encoders.serving import Unit, encoded, load_tower
from tests.workers.weights.test_encoder_names import stored
from workers.devices.device import Device, HostDevice
from workers.models.loading import LoadedModel, load_model
from workers.weights.cache import WeightCache
from workers.weights.loader import LoadOptions
from workers.weights.precision import Precision


@pytest.fixture(scope="module", params=["native", "reference"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "native":
        yield HostDevice(2, [], {})
        return
    from workers.devices.paddle import PaddleDevice

    yield PaddleDevice("cpu")


def units_of(name: str) -> list[Unit]:
    with np.load(GOLDEN / name / "units.npz") as found:
        return [unit for unit in UNITS if "x".join(map(str, unit)) in found]


def expected(name: str) -> dict[Unit, np.ndarray]:
    with np.load(GOLDEN / name / "units.npz") as found:
        return {unit: found["x".join(map(str, unit))] for unit in units_of(name)}


@pytest.mark.parametrize("name", MODELS)
def test_features_equal_those_of_transformers(name: str, device: Device) -> None:
    found = encoded(load_tower(GOLDEN / name, device), device, units_of(name))
    for unit, features in expected(name).items():
        assert np.abs(found[unit] - features).max() < 1e-4, unit


@pytest.mark.parametrize("name", MODELS)
def test_unit_has_the_same_bits_in_any_batch(name: str, device: Device) -> None:
    """A unit has the same bits among others, in any order, and with the call split anywhere: between passes, and within its
    rows, with more or fewer slices than parts of a pass."""
    tower, units = load_tower(GOLDEN / name, device), units_of(name)
    packed = encoded(tower, device, units)
    for others in ([units[1]], units[::-1], [units[2], units[0]]):
        for unit, features in encoded(tower, device, others).items():
            np.testing.assert_array_equal(features, packed[unit])
    ways = ((1, SLICE_ROWS), (1, 1), (3, 16), (40, 20))  # one of them with Paddle's ops: the passes are the same
    for per_pass, slice_rows in ways if isinstance(device, HostDevice) else ways[2:3]:
        every = list(range(1, tower.config.num_passes * per_pass))
        for cuts in (every[per_pass // 2 :: 3], every):
            for unit, features in encoded(tower, device, units, cuts, "tape", per_pass, slice_rows).items():
                np.testing.assert_array_equal(features, packed[unit])
    for unit, features in encoded(tower, device, units[1:3], [1], "eager", slice_rows=8).items():
        np.testing.assert_array_equal(features, packed[unit])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("precision", "kind", "loss"),
    [
        (Precision("bfloat16"), "bfloat16", 0.02),  # of qwen2_5_vl's transformers' own bfloat16 loses 0.018 to 0.030
        (Precision(vision_quantization="wint8"), "int8", 0.08),
        (Precision(quantization="wint8"), "float32", 1e-4),  # which rounds the text model alone
    ],
    ids=str,
)
def test_rounded_weights_stay_near_float32(name: str, precision: Precision, kind: str, loss: float) -> None:
    device = HostDevice(2, [], {})
    tower = load_tower(GOLDEN / name, device, precision)
    assert {block.qkv.format.kind for block in tower.blocks} == {kind}
    assert {linear.format.kind for linear in tower.patches.values()} == {"float32"}
    found = encoded(tower, device, units_of(name))
    for unit, features in expected(name).items():
        assert np.linalg.norm(found[unit] - features) < loss * np.linalg.norm(features), unit


def test_encoder_is_in_the_packed_file(tmp_path: Path) -> None:
    """The encoder is in the packed file, which later loads map; a text model alone has another file."""
    device, cache = HostDevice(2, [], {}), WeightCache(tmp_path / "cache", 1 << 30)
    path = GOLDEN / "qwen3_vl"
    config = ModelConfig.read(path)

    def load(precision: Precision, has_encoder: bool = True) -> LoadedModel:
        return load_model(
            path,
            config,
            device.ops,
            256,
            lambda _done, _all: None,
            LoadOptions(precision=precision, cache=cache),
            has_encoder=has_encoder,
        )

    for precision in (Precision(), Precision(vision_quantization="wint8")):
        towers = []
        for outcome in ("miss", "hit"):
            loaded = load(precision)
            assert loaded.cache == outcome
            assert loaded.model.encoder is not None
            towers.append(encoded(loaded.model.encoder, device, UNITS[:2]))
        assert all(np.array_equal(towers[0][unit], towers[1][unit]) for unit in UNITS[:2])
    path = tmp_path / "qwen3_vl"  # with the same weights
    shutil.copytree(GOLDEN / "qwen3_vl", path)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.4, 0.5, 0.6]}))
    config = ModelConfig.read(path)
    assert load(Precision()).cache == "miss"
    text = load(Precision(), has_encoder=False)
    assert (text.cache, text.model.encoder) == ("miss", None)
    assert text.num_bytes < loaded.num_bytes


def test_reload_with_another_encoder_shape_is_refused(tmp_path: Path) -> None:
    """Weights may be replaced in place only by those of the same shape."""
    shutil.copytree(GOLDEN / "qwen3_vl", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["vision_config"]["depth"] = 3
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="depth=4"):
        ModelConfig.read(GOLDEN / "qwen3_vl").of_same_shape(tmp_path / "other")


def test_missing_encoder_tensors_are_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "qwen3_vl", tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = stored(GOLDEN / "qwen3_vl")
    tensors["model.visual.extra.weight"] = tensors.pop("model.visual.pos_embed.weight")
    write_safetensors(tmp_path / "other" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as raised:
        load_tower(tmp_path / "other", HostDevice(2, [], {}))
    assert "visual.pos_embed.weight [64, 64] is missing" in str(raised.value)
    assert "visual.extra.weight [64, 64] is unexpected" in str(raised.value)


def test_paddle_layout_is_transposed(tmp_path: Path) -> None:
    """Baidu's own checkpoints hold linear weights as [in, out], also of the patch embedding."""
    shutil.copytree(GOLDEN / "ernie4_5_vl_moe", tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    no_linear = ("embed_tokens", "mlp.gate.", "moe_statics")
    turned = {
        name: np.ascontiguousarray(tensor.T) if tensor.ndim == 2 and not any(part in name for part in no_linear) else tensor
        for name, tensor in stored(GOLDEN / "ernie4_5_vl_moe").items()
    }
    write_safetensors(tmp_path / "other" / "model.safetensors", turned)
    device = HostDevice(2, [], {})
    found = encoded(load_tower(tmp_path / "other", device), device, UNITS[:2])
    for unit, features in encoded(load_tower(GOLDEN / "ernie4_5_vl_moe", device), device, UNITS[:2]).items():
        np.testing.assert_array_equal(found[unit], features)
