"""A checkpoint's sampling defaults are within the limits of a request."""

from __future__ import annotations

import json

import pytest

from engine.checkpoint.sampling_defaults import SamplingDefaults
from engine.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -2), ("top_k", 2**31), ("top_k", 10**30), ("top_p", 0), ("temperature", -1), ("max_new_tokens", 0)],
)
def test_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=name):
        SamplingDefaults.decode(json.dumps({name: value}).encode())


def test_the_rest_of_the_file_is_left_alone() -> None:
    assert SamplingDefaults.decode(b'{"top_k": 2147483647, "eos_token_id": [1]}') == SamplingDefaults(top_k=2**31 - 1)
