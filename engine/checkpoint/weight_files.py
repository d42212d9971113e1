"""Which files of a checkpoint directory have its weights. A directory may have the same weights twice: Mistral's repositories
have `consolidated.safetensors`, too.

Used by the loader, and by the launcher before any weights are loaded.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.checkpoint.files import leads_outside, read_file
from engine.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Index(msgspec.Struct):
    """The part of model.safetensors.index.json that is read."""

    weight_map: dict[str, str]  # the file of each tensor


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of the directory `path` that have its weights: those that the index names, or
    `model.safetensors`, or all. Raises CheckpointError for a damaged index."""
    index = files_by_tensor(path)
    if index is not None:
        return [path / name for name in sorted(set(index.values()))]
    single = path / _SINGLE
    return [single] if single.is_file() else sorted(path.glob("*.safetensors"))


def files_by_tensor(path: Path) -> dict[str, str] | None:
    """Return the name of each tensor's file according to the index; None if there is no index. Raises CheckpointError."""
    index_path = path / _INDEX
    if not index_path.is_file():
        return None
    try:
        found = msgspec.json.decode(read_file(index_path), type=_Index).weight_map
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index_path} cannot be read: {error}") from error
    for name in sorted(set(found.values())):
        if leads_outside(name):
            raise CheckpointError(f"{index_path}: weight_map names {name!r}, which is outside of the checkpoint")
    return found
