"""A checkpoint's file as memory: mapped read-only, with every failure as a `CheckpointError`. For the readers of formats."""

from __future__ import annotations

import mmap
from pathlib import Path

from engine.errors import CheckpointError


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. CheckpointError names a missing, unreadable or empty one."""
    try:
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}") from error
