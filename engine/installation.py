"""Where our packages lie and how processes of ours find them: in a wheel below `tokamak/`, which only our `sys.path` has, in a
checkout at its top.

So a user's process never meets our `tools` or `api`, and ours none of theirs, wherever it is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DISTRIBUTION = "tokamak-serve"  # on PyPI, where `tokamak` is another project
PACKAGES = Path(__file__).resolve().parents[1]  # has `engine` and its sister packages


def package_version() -> str:
    """The installed version; `0+uninstalled` in a source tree."""
    from importlib.metadata import PackageNotFoundError, version  # 8 ms of a start, for those who ask

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+uninstalled"


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a child that is Python and ours: its imports find our packages before all others."""
    given = (path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path)
    paths = dict.fromkeys([str(PACKAGES), *(os.path.abspath(path) for path in given)])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
