"""Names of a checkpoint's tensors, read from the headers of its files. Used by the launcher before any weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from engine.checkpoint.files import open_file
from engine.checkpoint.weight_files import files_by_tensor, weight_files
from engine.errors import CheckpointError

_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20


def tensor_names(path: Path) -> set[str]:
    """Return the names in the safetensors files of the directory `path`. Files that cannot be read add none; the loader reports
    them."""
    names: set[str] = set()
    try:
        if (index := files_by_tensor(path)) is not None:
            return set(index)
        for file in weight_files(path):
            names.update(_names_of(file))
    except (OSError, ValueError, TypeError, RecursionError, CheckpointError):
        pass
    return names


def _names_of(file: Path) -> Iterator[str]:
    with open(open_file(file), "rb") as stream:
        num_bytes = int.from_bytes(stream.read(_PREFIX_BYTES), "little")
        yield from json.loads(stream.read(min(num_bytes, _MAX_HEADER_BYTES)))
