"""Location of our packages and how our processes find them: in a wheel below `tokamak/`, which only our processes have in
`sys.path`; in a checkout at its top.

So a user's process never imports our `tools` or `api`, and ours never import the user's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

DISTRIBUTION = "tokamak-serve"  # on PyPI, where `tokamak` is another project
PACKAGES = Path(__file__).resolve().parents[1]  # contains `engine` and its sister packages
IS_CHECKOUT = (PACKAGES / "tools" / "serve").is_file()  # a wheel has no scripts
CUDA_DRIVER = "libcuda.so.1"  # of NVIDIA's cards
BUILD_AGAIN = "run tools/serve to build them" if IS_CHECKOUT else f"run pip install --force-reinstall {DISTRIBUTION}"


def package_version() -> str:
    """Return the installed version, or `0+uninstalled` in a source tree."""
    from importlib.metadata import PackageNotFoundError, version  # takes 8 ms, so only imported here

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+uninstalled"


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a child that is our Python: it finds our packages before all others."""
    given = (path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path)
    paths = dict.fromkeys([str(PACKAGES), *(os.path.abspath(path) for path in given)])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def program(name: str) -> str:
    """Return the command that starts a program of this environment from a shell in this directory."""
    path = Path(sys.executable).parent / name
    places = (Path(place) / name for place in os.get_exec_path())
    if not path.exists() or next((place for place in places if os.access(place, os.X_OK)), None) == path:
        return name
    return relative(path)


def relative(path: Path) -> str:
    """Return a path as a user of this directory would write it: relative if it is below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def command(subcommand: str) -> str:
    """Return the command that starts a subcommand of `tokamak` from a shell in this directory."""
    return f"{program('tokamak')} {subcommand}"
