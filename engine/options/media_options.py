"""Values of the options of vision models that are JSON objects. Used by the table of options."""

from __future__ import annotations

import json
from typing import Any

MODALITIES = ("image", "video")
MAX_ITEMS = 10_000


def parse_limits(text: str) -> dict[str, int]:
    """Items of each kind in a prompt: `{"image": 4, "video": 1}`, or `image=4,video=1`. Raises ValueError with an example."""
    if text.lstrip().startswith("{"):
        limits = parse_object(text)
    else:
        pairs = [part.partition("=") for part in text.split(",")]
        limits = {name.strip(): int(number) if number.strip().isdecimal() else number for name, _, number in pairs}
    for name, limit in limits.items():
        if name not in MODALITIES or type(limit) is not int or not 0 <= limit <= MAX_ITEMS:
            raise ValueError(f'expected numbers up to {MAX_ITEMS} for image and video, such as {{"image": 4, "video": 1}}')
    return limits


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError if it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ValueError('expected a JSON object, such as {"max_pixels": 1003520}')
    return content
