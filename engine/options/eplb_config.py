"""The value of `--eplb-config`: a JSON object. Used by the table of options."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from engine.config import EplbConfig

_WHOLE = {"num_redundant_experts": 0, "window_size": 1, "step_interval": 1}  # the least
_NUMBERS = {"check_interval_s": 0.01, "statistics_interval_s": 0.01, "min_gain": 0.0}
_MOST = 1e9
_ELSEWHERE: dict[str, Callable[[Any], str]] = {  # other engines' keys
    "use_async": lambda value: "" if value is True else "experts always move beside the steps; leave it out, or true",
    "communicator": lambda value: "no weights are sent, as each rank maps all of them; leave it out",
}


def parse_eplb_config(text: str) -> EplbConfig:
    """ValueError with what would have been right."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ValueError('expected a JSON object, such as {"num_redundant_experts": 2}')
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key in _ELSEWHERE:
            if problem := _ELSEWHERE[key](value):
                raise ValueError(f"{key} {json.dumps(value)}: {problem}")
        elif key in _WHOLE:
            found[key] = _checked(key, value, _WHOLE[key], is_whole=True)
        elif key in _NUMBERS:
            found[key] = float(_checked(key, value, _NUMBERS[key], is_whole=False))
        else:
            raise ValueError(f"{key} is no key; expected some of {', '.join((*_WHOLE, *_NUMBERS))}")
    return EplbConfig(**found)


def _checked(key: str, value: Any, least: float, *, is_whole: bool) -> Any:
    has_type = not isinstance(value, bool) and isinstance(value, int if is_whole else (int, float))
    if not has_type or not least <= value <= _MOST:
        kind = "an integer" if is_whole else "a number"
        raise ValueError(f"{key} {json.dumps(value)}: expected {kind} from {least:g} to {_MOST:g}")
    return value
