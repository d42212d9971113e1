"""Names of a checkpoint's tensors, read from the headers of its files. Used by the launcher before any weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from engine.checkpoint.files import open_file, read_file

_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20


def tensor_names(path: Path) -> set[str]:
    """Return the names in the safetensors files of the directory `path`. Files that cannot be read add none; the loader reports
    them."""
    index = path / "model.safetensors.index.json"
    names: set[str] = set()
    try:
        if index.is_file():
            return set(json.loads(read_file(index))["weight_map"])
        for file in sorted(path.glob("*.safetensors")):
            names.update(_names_of(file))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return names


def _names_of(file: Path) -> Iterator[str]:
    with open(open_file(file), "rb") as stream:
        num_bytes = int.from_bytes(stream.read(_PREFIX_BYTES), "little")
        yield from json.loads(stream.read(min(num_bytes, _MAX_HEADER_BYTES)))
