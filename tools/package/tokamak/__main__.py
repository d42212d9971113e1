"""The command `tokamak`, also as `python -m tokamak` or run as a file. Puts our packages first on this process's path, then
runs `tools.cli`. Children get the path from `engine/installation.py`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

_HERE = os.path.dirname(os.path.abspath(__file__))
_REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


def main() -> int:
    """Run the subcommand named by the arguments and return the exit code."""
    packages = _HERE if os.path.isdir(os.path.join(_HERE, "engine")) else _REPOSITORY
    sys.path[:] = [packages, *(path for path in sys.path if path not in (packages, _HERE)), os.path.dirname(_HERE)]
    code: int = import_module("tools.cli").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
