"""A unit's features do not depend on other units of the call, with every kernel, in every precision, with heads of the
published sizes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from ops import _cpu
from tests.ops.tables import table
from tests.paths import GOLDEN
from tests.workers.encoders.serving import Unit, encoded
from workers.devices.device import HostDevice
from workers.encoders.tower import Tower
from workers.models.loading import load_model
from workers.weights.loader import LoadOptions
from workers.weights.precision import Precision

# as tall as wide, with a rest of a window, video, one token
UNITS: list[Unit] = [(1, 8, 8), (1, 10, 6), (2, 4, 12), (1, 2, 2)]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"hidden_size": 160, "num_heads": 2, "depth": 2, "fullatt_block_indexes": [1]},  # heads of 80, windows
    "qwen3_vl": {"hidden_size": 144, "num_heads": 2, "depth": 2, "deepstack_visual_indexes": [0]},  # heads of 72
}


PRECISIONS = [Precision(), Precision("bfloat16"), Precision(vision_quantization="wint8")]


def write(path: Path, name: str) -> ModelConfig:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config["vision_config"] |= SHAPES[name]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / name / "preprocessor_config.json", path)
    return ModelConfig.read(path)


def drawn(path: Path, config: ModelConfig, device: HostDevice, precision: Precision) -> Tower:
    """Return an encoder with random weights."""
    loaded = load_model(
        path, config, device.ops, 256, lambda _done, _all: None, LoadOptions(precision=precision, random_seed=3)
    )
    assert loaded.model.encoder is not None
    return loaded.model.encoder


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: f"{precision.dtype} {precision.vision_quantization}")
@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("name", SHAPES)
def test_answer_does_not_depend_on_other_pictures(name: str, variant: str, precision: Precision, tmp_path: Path) -> None:
    config = write(tmp_path / "model", name)
    with table(f"{variant}-2"):
        device = HostDevice(2, [], {})
        tower = drawn(tmp_path / "model", config, device, precision)
        packed = encoded(tower, device, UNITS)
        assert all(np.isfinite(features).all() and features.std() > 1e-3 for features in packed.values())
        for units in ([UNITS[0]], [UNITS[2], UNITS[1]]):
            for unit, features in encoded(tower, device, units, cuts=[1]).items():
                np.testing.assert_array_equal(features, packed[unit])
        device = HostDevice(1, [], {})
        for unit, features in encoded(tower, device, UNITS[::-1]).items():
            np.testing.assert_array_equal(features, packed[unit])
