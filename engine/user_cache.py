"""Where this user's programs keep what they can make again. Used by the launcher."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Tokamak's directory there, which may not exist yet ($XDG_CACHE_HOME, as the XDG base directory specification has it)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokamak"
