"""Compares the defaults of options with those of transformers, which left_out.py wrote:

python -m tests.workers.variants.check_left_out FILE.json
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.checkpoint.families import MODEL_TYPES
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError

Config = dict[str, Any]

# without these a file is refused by name
NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "intermediate_size_mlp", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "depth", "num_heads", "out_hidden_size"),
)
UNUSABLE = (
    "does not divide",
    "should be an integer of at most",
)  # defaults, of heads and of tokens, in models too small for them
NOT_COMPARED = ("dtype", "is_transformers", "eos_token_ids", "unknown_options")
NAMES = {"4": {"content": "[IMG_END]", "special": True}, "7": {"content": "[IMG_BREAK]", "special": True}}


def differences(case: Config, directory: Path) -> Iterator[str]:
    """Yield what is read differently from a file and from all options that transformers has for it; of the file, and without
    each of its options."""
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": NAMES}))
    if problem := difference(case["config"], case["full"], directory):
        yield f"{case['family']}: {problem}"
    for path, is_null, new, removed in case["changes"]:
        given, full = copy.deepcopy(case["config"]), copy.deepcopy(case["full"])
        remove(given, path)
        if is_null:
            put(given, path, None)
        for place in removed:
            remove(full, place)
        for place, value in new:
            put(full, place, value)
        if problem := difference(given, full, directory):
            yield f"{case['family']}: {'.'.join(path)} {'is null' if is_null else 'is left out'}: {problem}"


def difference(given: Config, full: Config, directory: Path) -> str:
    """Return what is read differently, or nothing. What transformers cannot compute, or has to be in the file, may differ."""
    expected, found = read(full, directory), read(given, directory)
    if isinstance(expected, str):
        is_unusable = any(reason in expected for reason in UNUSABLE) or isinstance(found, str)
        return "" if is_unusable else f"all options are refused: {expected}"
    if isinstance(found, str):
        return "" if found.endswith(tuple(f"{name}: is missing" for name in NEEDED)) else f"refused: {found}"
    if not found.unknown_options and expected.unknown_options:
        return f"of all options these are unknown: {expected.unknown_options}"
    return "; ".join(
        f"{name}: {getattr(found, name)}, expected {getattr(expected, name)}"
        for name in found.__struct_fields__
        if name not in NOT_COMPARED and getattr(found, name) != getattr(expected, name)
    )


def read(config: Config, directory: Path) -> ModelConfig | str:
    """Return what is read, or why it is refused."""
    name = MODEL_TYPES[config["model_type"]].class_names[0]
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    try:
        return ModelConfig.read(directory)
    except CheckpointError as error:
        return str(error)


def put(config: Config, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(config.get(name), dict):
            config[name] = {}
        config = config[name]
    config[path[-1]] = value


def remove(config: Config, path: list[str]) -> None:
    for name in path[:-1]:
        config = config.get(name) or {}
    config.pop(path[-1], None)


def main() -> int:
    cases = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as directory:
        found = [problem for case in cases for problem in differences(case, Path(directory))]
    print(*found, f"{sum(1 + len(case['changes']) for case in cases)} configurations, {len(found)} differ", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
