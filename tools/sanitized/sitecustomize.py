"""Makes every Python process of tools/sanitize load the native modules that were built with sanitizers instead of the usual
ones. Python imports a module of this name at its start; only tools/sanitize has the directory on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PLACE = os.environ["TOKAMAK_SANITIZED"]


class SanitizedModules:
    """Finder of `ops._cpu` and `shm._native`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("ops._cpu", "shm._native"):
            return None
        package, _, module = name.partition(".")
        (file,) = [file for file in os.listdir(f"{PLACE}/{package}") if file.startswith(module)]
        return importlib.util.spec_from_file_location(name, f"{PLACE}/{package}/{file}")


sys.meta_path.insert(0, SanitizedModules)
