"""The value of `--eplb-config`: a JSON object. Used by the table of options."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from engine.config import EplbConfig
from engine.options.json_object import checked_number, json_object

_WHOLE = {"num_redundant_experts": 0, "window_size": 1, "step_interval": 1}  # minimum
_NUMBERS = {"check_interval_s": 0.01, "statistics_interval_s": 0.01, "min_gain": 0.0}
_ELSEWHERE: dict[str, Callable[[Any], str]] = {  # other engines' keys
    "use_async": lambda value: "" if value is True else "experts always move asynchronously; remove it or set it to true",
    "communicator": lambda value: "experts move without communication, because every rank maps all weights; remove it",
}


def parse_eplb_config(text: str) -> EplbConfig:
    """Parse the option. Raises ValueError that names the accepted values."""
    content = json_object(text, '{"num_redundant_experts": 2}')
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key in _ELSEWHERE:
            if problem := _ELSEWHERE[key](value):
                raise ValueError(f"{key} {json.dumps(value)}: {problem}")
        elif key in _WHOLE:
            found[key] = checked_number(key, value, _WHOLE[key])
        elif key in _NUMBERS:
            found[key] = float(checked_number(key, value, _NUMBERS[key], is_whole=False))
        else:
            raise ValueError(f"unknown key {key}; expected one of {', '.join((*_WHOLE, *_NUMBERS))}")
    return EplbConfig(**found)
