"""Places of our packages and how our processes find them: in a wheel below `tokamak/`, which only our `sys.path` has, in a
checkout at its top.

So a user's process never imports our `tools` or `api`, and ours none of his, wherever it is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

DISTRIBUTION = "tokamak-serve"  # on PyPI, where `tokamak` is another project
PACKAGES = Path(__file__).resolve().parents[1]  # has `engine` and its sister packages
IS_CHECKOUT = (PACKAGES / "tools" / "serve").is_file()  # a wheel has no scripts
BUILD_AGAIN = "run tools/serve to build them" if IS_CHECKOUT else f"run pip install --force-reinstall {DISTRIBUTION}"


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


def program(name: str) -> str:
    """Return how a shell in this directory starts a program of this environment."""
    path = Path(sys.executable).parent / name
    places = (Path(place) / name for place in os.get_exec_path())
    if not path.exists() or next((place for place in places if os.access(place, os.X_OK)), None) == path:
        return name
    return relative(path)


def relative(path: Path) -> str:
    """A path as a user of this directory writes it: relative where it lies below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def command(subcommand: str) -> str:
    """Return how a shell in this directory starts a subcommand of `tokamak`."""
    return f"{program('tokamak')} {subcommand}"
