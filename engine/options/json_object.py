"""Options with a JSON object as their value."""

from __future__ import annotations

import json
from typing import Any

_MOST = 1e9


def json_object(text: str, example: str) -> dict[str, Any]:
    """Return the object in `text`. Raises ValueError with an example."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, such as {example}")
    return content


def checked_number(key: str, value: Any, least: float, most: float = _MOST, *, is_whole: bool = True) -> Any:
    """Return `value` if it is a number from `least` to `most`; otherwise raise ValueError."""
    has_type = not isinstance(value, bool) and isinstance(value, int if is_whole else (int, float))
    if not has_type or not least <= value <= most:
        kind = "an integer" if is_whole else "a number"
        raise ValueError(f"{key} {json.dumps(value)}: expected {kind} from {least:g} to {most:g}")
    return value
