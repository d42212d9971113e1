"""`tokamak serve` where the test device has a driver that keeps its memory: `python -m tests.devices.serve_with_driver LIBRARY
[options]`.
"""

from __future__ import annotations

import sys

from engine.options.resolve_device import ARENA_LIBRARIES
from tests.devices.build import NAME
from tools.cli import main

if __name__ == "__main__":
    ARENA_LIBRARIES[NAME] = sys.argv[1]
    sys.exit(main(["serve", *sys.argv[2:]]))
