"""Writes what transformers reads when options are left out of a config.json (which needs it):

python -m tests.workers.variants.left_out OUT.json [--count N] [--seed N]

Each case is a random shape of a family, all options that transformers has for it, and how these differ without an option of the
file, or if that is null. `python -m tests.workers.variants.check_left_out OUT.json` compares it with what is read here;
`left_out.json` is the part that the tests read (--count 1).
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from tests.workers.variants import random_pictures, random_shapes
from tests.workers.variants.random_shapes import Config, Draw

WHOLE = ("model_type", "text_config")  # cannot be left out
NO_NULL = ("tie_word_embeddings",)
UNUSED = (
    "id2label",
    "label2id",
    "dtype",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "chunk_size_feed_forward",
)


def options_of(config: Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each option of all objects."""
    for name, value in config.items():
        if name not in WHOLE:
            yield (*path, name)
        if isinstance(value, dict):
            yield from options_of(value, (*path, name))


def changed(config: Config, path: tuple[str, ...], *, is_null: bool) -> Config:
    """Return the configuration without an option, or with null in its place."""
    changed = inner = copy.deepcopy(config)
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return changed if not is_null else put(changed, path, None)


def put(config: Config, path: tuple[str, ...], value: Any) -> Config:
    inner = config
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    return config


def read(config: Config) -> Config | None:
    """Return all options that transformers has for a configuration; None: it refuses it."""
    try:
        found = AutoConfig.for_model(**copy.deepcopy(config)).to_json_string(use_diff=False)
    except Exception:
        return None
    return without_unused(json.loads(found))


def without_unused(config: Config) -> Config:
    return {
        name: without_unused(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in UNUSED
    }


def leaves(config: Config, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return all values that are no objects, by their path in JSON."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= leaves(value, (*path, name)) if isinstance(value, dict) and value else {json.dumps((*path, name)): value}
    return found


def case(family: str, config: Config) -> Config | None:
    full = read(config)
    if full is None:
        return None
    before, changes = leaves(full), []
    for path in options_of(config):
        for is_null in (False, True):
            found = None if is_null and path[-1] in NO_NULL else read(changed(config, path, is_null=is_null))
            if found is None:
                continue
            after = leaves(found)
            new = [[json.loads(key), value] for key, value in after.items() if key not in before or before[key] != value]
            changes.append([path, is_null, new, [json.loads(key) for key in before if key not in after]])
    return {"family": family, "config": config, "full": full, "changes": changes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    cases = []
    for family, maker in (random_shapes.FAMILIES | random_pictures.FAMILIES).items():
        seeds = range(options.seed, options.seed + options.count)
        drawn = (json.loads(json.dumps(maker(Draw(f"{family} {seed}")) | {"model_type": family})) for seed in seeds)
        cases += filter(None, (case(family, config) for config in drawn))
    options.out.write_text("[\n" + ",\n".join(json.dumps(each, separators=(",", ":")) for each in cases) + "\n]\n")


if __name__ == "__main__":
    main()
