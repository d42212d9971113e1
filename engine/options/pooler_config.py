"""The value of `--pooler-config`: a JSON object with vLLM's keys. Used by the table of options."""

from __future__ import annotations

import json
from typing import Any

from engine.options.json_object import json_object

_KINDS = {"LAST": "last", "MEAN": "mean", "CLS": "cls"}
_NAMES = {"seq_pooling_type": "pooling_type", "use_activation": "normalize"}  # vLLM's newer names
_KEYS = ("pooling_type", "normalize", "classifier_from_token")


def parse_pooler_config(text: str) -> dict[str, Any]:
    """Return the settings by our own keys: kind, is_normalized, class_tokens. Raises ValueError that names the accepted
    values."""
    found: dict[str, Any] = {}
    for name, value in json_object(text, '{"pooling_type": "MEAN", "normalize": true}').items():
        key = _NAMES.get(name, name)
        if key == "pooling_type":
            if not isinstance(value, str) or value.upper() not in _KINDS:
                raise ValueError(f"{name} {json.dumps(value)}: expected {', '.join(_KINDS)}")
            found["kind"] = _KINDS[value.upper()]
        elif key == "normalize":
            if not isinstance(value, bool):
                raise ValueError(f"{name} {json.dumps(value)}: expected true or false")
            found["is_normalized"] = value
        elif key == "classifier_from_token":
            are_words = isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) and word for word in value)
            if not are_words:
                raise ValueError(f'{name} {json.dumps(value)}: expected two tokens, such as ["no", "yes"]')
            found["class_tokens"] = value
        else:
            raise ValueError(f"unknown key {name}; expected one of {', '.join(_KEYS)}")
    return found
