"""Exit codes of commands: 0 done, 1 failed, 2 a mistake in the options, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable

from engine.errors import TokamakError, exit_code_of

INTERRUPTED = 130


def exit_code(program: str, work: Callable[[], int], when_interrupted: str = "") -> int:
    """Do `work` and return its exit code, or that of its error, printed. `when_interrupted`: printed after Ctrl+C."""
    try:
        return work()
    except TokamakError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        if when_interrupted:
            print(when_interrupted, file=sys.stderr)
        return INTERRUPTED
