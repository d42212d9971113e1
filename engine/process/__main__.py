"""The entry of every child process, see `main.py`.

Garbage is not collected until its actor is ready (`actor.end_start`): modules that are loaded leave little, and looking for it
takes a tenth of their time."""

import gc
import sys

gc.disable()

from engine.process.main import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
