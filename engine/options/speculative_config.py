"""The value of `--speculative-config`: a JSON object with vLLM's keys. Used by the table of options."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from engine.config import DRAFT_METHODS, MAX_DRAFTS, SpeculativeConfig
from engine.options.json_object import checked_number, json_object
from engine.options.nearest import nearest

_NAMES = {"deepseek_mtp": "mtp", "ernie_mtp": "mtp", "qwen3_next_mtp": "mtp"}  # names in other engines
_LACKING = ("eagle", "eagle3", "medusa", "mlp_speculator", "draft_model", "mtp_eagle", "ngram_gpu", "dflash")
_DEFAULT_DRAFTS, _DEFAULT_SUFFIX_DRAFTS = 3, 16
_WHOLE = {  # minimum, maximum
    "num_speculative_tokens": (1, MAX_DRAFTS),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
    "suffix_decoding_max_tree_depth": (2, 256),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
}
_NUMBERS = {"suffix_decoding_max_spec_factor": (0.1, 100.0), "suffix_decoding_min_token_prob": (0.0, 1.0)}
_KEYS = ("method", *_WHOLE, *_NUMBERS, "adaptive")


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parse the option. Raises ValueError that names the accepted values."""
    found: dict[str, Any] = {}
    for key, value in json_object(text, '{"method": "ngram", "num_speculative_tokens": 5}').items():
        if key == "method":
            found[key] = _methods(value)
        elif key == "adaptive":
            if not isinstance(value, bool):
                raise ValueError(f"adaptive {json.dumps(value)}: expected true or false")
            found[key] = value
        elif key in _WHOLE:
            found[key] = checked_number(key, value, *_WHOLE[key])
        elif key in _NUMBERS:
            found[key] = float(checked_number(key, value, *_NUMBERS[key], is_whole=False))
        elif key == "model":
            raise ValueError(f"model {json.dumps(value)}: draft models are not supported; remove it, and use method {_list()}")
        else:
            raise ValueError(f"unknown key {key}, expected one of {', '.join(_KEYS)}{_hint(key, _KEYS)}")
    if found and "method" not in found:
        raise ValueError(f"method is missing; expected {_list()}")
    is_suffix = "suffix" in found.get("method", "").split(",")
    found.setdefault("num_speculative_tokens", _DEFAULT_SUFFIX_DRAFTS if is_suffix else _DEFAULT_DRAFTS)
    config = SpeculativeConfig(**found)
    least, most = config.prompt_lookup_min, config.prompt_lookup_max
    if least > most:
        raise ValueError(f"prompt_lookup_min {least} exceeds prompt_lookup_max {most}; lower the first or raise the second")
    return config


def _methods(value: Any) -> str:
    """Return the names of methods separated by commas, in the order in which they are tried, the cheapest first."""
    names = [_NAMES.get(name.strip(), name.strip()) for name in value.split(",")] if isinstance(value, str) else [value]
    for name in names:
        if name in _LACKING:
            raise ValueError(f"method {json.dumps(value)}: {name} is not supported; expected {_list()}")
        if name not in DRAFT_METHODS:
            raise ValueError(f"method {json.dumps(value)}: expected {_list()}{_hint(str(name), (*DRAFT_METHODS, *_NAMES))}")
        if names.count(name) > 1:
            raise ValueError(f"method {json.dumps(value)}: {name} is given {names.count(name)} times; give it once")
    return ",".join(name for name in DRAFT_METHODS if name in names)


def _hint(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f"; did you mean {close}?" if close else ""


def _list() -> str:
    return f"{', '.join(DRAFT_METHODS[:-1])} or {DRAFT_METHODS[-1]}, or several separated by commas"
