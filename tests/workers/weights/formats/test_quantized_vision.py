"""Quantized vision models: their encoders are stored as floats, which the configuration lists in each writer's way."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden.make_units import UNITS
from tests.paths import GOLDEN
from tests.workers.encoders.serving import encoded, load_tower
from tests.workers.seeing import make_seeing_runner, picture_sequences
from tests.workers.serving import Serving
from tests.workers.weights.formats.quantizers import (
    Format,
    awq,
    gptq,
    int_quantized,
    pack_quantized,
    write_quantized,
    write_tensors,
)
from tests.workers.weights.test_encoder_names import checkpoint_of, stored
from workers.devices.device import HostDevice
from workers.weights.precision import Precision

QUANTIZATIONS = {
    "awq": (awq(32), "modules_to_not_convert", ["visual"]),
    "gptq": (gptq(4, 32), "modules_to_not_convert", ["visual", "lm_head"]),
    "packed": (pack_quantized(4, 32), "ignore", ["lm_head", "re:.*visual.*"]),
    "integers": (int_quantized(-1), "ignore", ["lm_head", "re:.*visual.*"]),  # under the same names as floats
}


def quantized(name: str, format: Format, path: Path) -> dict[str, np.ndarray]:
    """Write a golden model as a checkpoint of this format at `path`; return the value of each tensor."""
    shutil.copytree(GOLDEN / name, path, ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    return write_quantized(path, json.loads((GOLDEN / name / "config.json").read_text()), stored(GOLDEN / name), format)


def form_of(kind: str) -> Format:
    format, option, modules = QUANTIZATIONS[kind]
    return replace(format, config=format.config | {option: modules})


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])  # older names, and newer ones
def test_encoder_is_not_quantized(name: str, kind: str, tmp_path: Path) -> None:
    """The encoder has the same bits, and may be rounded like other encoders; the decoder has the values of its integers."""
    path = tmp_path / "quantized"
    worth = quantized(name, form_of(kind), path)
    checkpoint, plain = checkpoint_of(path), checkpoint_of(GOLDEN / name)
    up = "model.layers.1.mlp.up_proj.weight"
    (of_up,) = (values for title, values in worth.items() if title.endswith("layers.1.mlp.up_proj.weight"))
    np.testing.assert_array_equal(checkpoint.read(up), of_up)
    assert not np.array_equal(checkpoint.read(up), plain.read(up))
    device = HostDevice(1, [], {})
    for precision in (Precision(), Precision(vision_quantization="wint8")):
        towers = (load_tower(each, device, precision) for each in (path, GOLDEN / name))
        found, expected = (encoded(tower, device, UNITS[:2]) for tower in towers)
        for unit in UNITS[:2]:
            np.testing.assert_array_equal(found[unit], expected[unit])


def test_answers_equal_those_of_float_weights(tmp_path: Path) -> None:
    worth = quantized("qwen2_5_vl", form_of("awq"), tmp_path / "quantized")
    shutil.copytree(GOLDEN / "qwen2_5_vl", tmp_path / "plain", ignore=shutil.ignore_patterns("*.safetensors"))
    write_tensors(tmp_path / "plain" / "model.safetensors", worth)
    answers = []
    for path in (tmp_path / "quantized", tmp_path / "plain", GOLDEN / "qwen2_5_vl"):
        runner, arena = make_seeing_runner(path, ops="reference", plan="eager")
        sequences = picture_sequences("qwen2_5_vl", arena)[:2]
        serving = Serving(runner)
        for slot, sequence in enumerate(sequences):
            serving.place(sequence, slot)
        serving.run(sequences)
        answers.append([sequence.answer() for sequence in sequences])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
