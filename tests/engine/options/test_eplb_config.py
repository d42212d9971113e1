"""`--eplb-config`: its fields, and messages for invalid values."""

from __future__ import annotations

import re

import pytest

from engine.config import EplbConfig
from engine.options.eplb_config import parse_eplb_config


def test_missing_fields_have_defaults() -> None:
    assert parse_eplb_config("{}") == EplbConfig()
    text = '{"num_redundant_experts": 3, "window_size": 10, "step_interval": 20, "min_gain": 0, "use_async": true}'
    found = EplbConfig(num_redundant_experts=3, window_size=10, step_interval=20, min_gain=0.0)
    assert parse_eplb_config(text) == found
    assert parse_eplb_config('{"check_interval_s": 1, "statistics_interval_s": 2.5}').statistics_interval_s == 2.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"window": 1}', "unknown key window; expected one of num_redundant_experts, window_size"),
        ('{"window_size": 0}', "window_size 0: expected an integer from 1"),
        ('{"window_size": 1.5}', "window_size 1.5: expected an integer"),
        ('{"window_size": true}', "window_size true: expected an integer"),
        ('{"num_redundant_experts": -1}', "num_redundant_experts -1: expected an integer from 0"),
        ('{"min_gain": "much"}', 'min_gain "much": expected a number from 0'),
        ('{"min_gain": NaN}', "min_gain NaN: expected a number"),
        ('{"check_interval_s": 0}', "check_interval_s 0: expected a number from 0.01"),
        ('{"use_async": false}', "use_async false: experts always move asynchronously"),
        ('{"communicator": "nccl"}', 'communicator "nccl": experts move without communication'),
    ],
)
def test_wrong_values(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_eplb_config(text)
