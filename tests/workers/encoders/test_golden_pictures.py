"""The golden pictures through the encoder of a runner: features like those of transformers, and with them the golden
answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.messages.media import Encode, EncoderCall
from shm.slab import SlabHandle
from tests.golden.make_units import MODELS
from tests.paths import GOLDEN
from tests.workers.seeing import hash_of, make_seeing_runner, picture_sequences
from tests.workers.serving import Serving, encoder_of, golden_cases

BACKENDS: dict[str, dict[str, Any]] = {"reference": {"ops": "reference", "plan": "eager"}, "native": {"threads": 2}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_pixels_give_the_golden_answers(name: str, backend: str) -> None:
    runner, arena = make_seeing_runner(GOLDEN / name, **BACKENDS[backend])
    sequences = picture_sequences(name, arena)
    encoder = encoder_of(runner)
    assert encoder is not None
    expected: np.ndarray = np.array(arena.rows)
    arena.rows[:] = 0
    units, pixels = [], {}
    for sequence, case in zip(sequences, golden_cases(name), strict=True):
        for path, grid, row, unit in zip(
            case["images"], case["image_grid_thw"], sequence.unit_rows, sequence.units, strict=True
        ):
            key = hash_of(f"{name} {path}")
            _, height, width = grid
            units.append(Encode(key, row, unit.num_tokens, height, width, "media-0", SlabHandle(0, 0, 0, 0)))
            picture = Image.open(GOLDEN / name / path).convert("RGB")
            sides = (width * encoder.config.patch_size, height * encoder.config.patch_size)
            pixels[key] = np.asarray(picture.resize(sides, Image.Resampling.BICUBIC))[None]
    num_passes = encoder.config.num_passes
    for first in range(num_passes):
        encoder.run(EncoderCall(3, units, first, first + 1, num_passes), pixels if first == 0 else {})
    found: np.ndarray = np.array(arena.rows)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    for sequence, case in zip(sequences, golden_cases(name), strict=True):
        serving = Serving(runner)
        serving.place(sequence, 2)
        serving.run([sequence])
        assert sequence.outputs == case["greedy_token_ids"]
        for (_, values), top in zip(sequence.tops, case["top_logprobs"], strict=True):
            np.testing.assert_allclose(values, [value for _, value in top], atol=1e-3)
        for position, value in enumerate(case["prompt_logprobs"]):
            assert value is None or sequence.prompt_logprobs[position] == pytest.approx(value, abs=1e-3)
