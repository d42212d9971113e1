"""The entry point of every child process, see `main.py`.

Garbage collection is off until the actor is ready (`actor.end_start`): loading modules leaves little garbage, and collection
takes a tenth of their time.
"""

import gc
import sys

gc.disable()

from engine.process.main import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
