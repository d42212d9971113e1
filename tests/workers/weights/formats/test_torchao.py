"""torchao's weights in small matrices, beside the numbers that torchao computes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.quantization_config import QuantizationConfig, WeightScheme
from tests.workers.weights.formats.quantizers import write_tensors
from workers.weights.formats.quantized import decoded
from workers.weights.formats.tensor import Tensor
from workers.weights.safetensors import SafetensorsFile

CONFIG = QuantizationConfig("torchao", (WeightScheme("torchao", 0, (1, 0)),))


def read(directory: Path, kind: str, stored: dict[str, np.ndarray], **attributes: Any) -> Tensor:
    path = directory / "model.safetensors"
    description = json.dumps({"_type": kind, "_data": attributes})
    write_tensors(path, {f"m._weight_{name}": values for name, values in stored.items()}, {"m.weight": description})
    file = SafetensorsFile(path)
    return decoded(dict(file.tensors), CONFIG, file.metadata)["m.weight"]


@pytest.mark.parametrize("size", [32, 48])
def test_last_group_may_be_smaller(size: int, tmp_path: Path) -> None:
    """The size of groups is that of the attributes, also if the number of groups divides the inputs."""
    generator = np.random.default_rng(0)
    codes = generator.integers(-8, 8, (6, 100)).astype(np.int8)
    num_groups = -(-100 // size)
    scales, zeros = (generator.standard_normal((num_groups, 6), np.float32) for _ in range(2))
    packed = (codes[:, ::2] & 15 | codes[:, 1::2] << 4).astype(np.int8)
    found = read(tmp_path, "Int4Tensor", {"qdata": packed, "scale": scales, "zero_point": zeros}, block_size=[1, size])
    groups = np.arange(100) // size
    np.testing.assert_array_equal(found.read(), codes * scales.T[:, groups] + zeros.T[:, groups])
    assert found.kept() == "groups of several sizes"


def test_rectangle_larger_than_the_weight_is_the_whole(tmp_path: Path) -> None:
    codes = np.arange(-4, 4, dtype=np.int8).reshape(2, 4)
    found = read(tmp_path, "Int8Tensor", {"qdata": codes, "scale": np.full((1, 1), 0.5, np.float32)}, block_size=[1 << 70] * 2)
    np.testing.assert_array_equal(found.read(), codes * np.float32(0.5))
