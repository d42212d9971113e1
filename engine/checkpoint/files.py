"""Files of checkpoints and of what is made of them: mapping one, and where this user keeps what can be made again.

Used by the readers of formats in every process, and by the launcher."""

from __future__ import annotations

import mmap
import os
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


def user_cache() -> Path:
    """Where this user's programs keep what they can make again: Tokamak's directory there, which may not exist yet
    ($XDG_CACHE_HOME, as the XDG base directory specification has it)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokamak"
