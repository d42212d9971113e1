"""Limits on the cost of each precision: mean error of a log-probability, and perplexity, of the embedded model as it is served.
Bounds are about three times the values in `precision.md`, as there are fewer tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.workers.weights.formats.accuracy import WEIGHTS_ALONE, Conversation, Errors, conversations_of, logprobs_of
from tests.workers.weights.formats.precision import FORMATS, OPTIONS, TYPES, write_format, write_type
from tests.workers.weights.formats.quantizers import DEMO

BOUNDS = {
    "--dtype float32": 0.00001,
    "--dtype bfloat16": 0.0003,
    "--quantization wint8": 0.0013,
    "--quantization wint4": 0.015,
    "--kv-cache-dtype bfloat16": 0.0002,
    "--kv-cache-dtype int8": 0.0006,
    "--quantization wint8 --kv-cache-dtype int8": 0.0013,
    "--quantization wint4 --kv-cache-dtype int8": 0.015,
}
STORED_BOUNDS = {
    "int8, a scale each output": 0.0012,
    "GPTQ layout, 4 bits, groups of 64": 0.013,
    "GPTQ layout, 8 bits, zero points, groups of 32": 0.0008,
    "AWQ layout, 4 bits, zero points, groups of 32": 0.008,
    "FP8, blocks of 128 x 128": 0.0024,
    "bitsandbytes NF4, blocks of 64": 0.011,
    "NVFP4, groups of 16": 0.012,
    "Q8_0": 0.001,
    "Q5_1": 0.0045,
    "Q4_0": 0.013,
}


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return conversations_of(40)


@pytest.fixture(scope="module")
def exact(conversations: list[Conversation]) -> np.ndarray:
    return logprobs_of(DEMO, conversations, **WEIGHTS_ALONE)


def assert_within(errors: Errors, bound: float) -> None:
    assert errors.mean <= bound
    assert abs(errors.perplexity) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_quantization_options_stay_within_bounds(name: str, conversations: list[Conversation], exact: np.ndarray) -> None:
    assert_within(Errors.of(logprobs_of(DEMO, conversations, **OPTIONS[name]), exact), BOUNDS[name])


@pytest.mark.parametrize("name", STORED_BOUNDS)
def test_stored_formats_stay_within_bounds(
    name: str, conversations: list[Conversation], exact: np.ndarray, tmp_path: Path
) -> None:
    assert name in FORMATS or name in TYPES
    path = write_format(name, tmp_path / "model") if name in FORMATS else write_type(name, tmp_path / "model")
    assert_within(Errors.of(logprobs_of(path, conversations, dtype="bfloat16"), exact), STORED_BOUNDS[name])
