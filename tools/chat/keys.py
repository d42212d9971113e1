"""Keys that work while an answer comes, when no line is typed.

Used by `tokamak chat`, in its process. The terminal turns Ctrl+C into a signal, but keeps Ctrl+D for whatever reads next: until
then it does nothing, and a line editor never gets it. So Ctrl+D is made a signal key too, in place of Ctrl+backslash.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Iterator
from types import FrameType

CTRL_D = b"\x04"
_CHARACTERS = 6  # index of the special characters in the attributes of a terminal


@contextlib.contextmanager
def ctrl_d_raises() -> Iterator[None]:
    """Raise EOFError in the main thread on Ctrl+D, as at a prompt. The terminal at stdin must be ours to read. Signals that end
    the process raise SystemExit meanwhile, so that the terminal gets its keys back."""
    attributes = termios.tcgetattr(sys.stdin)
    changed = [*attributes]
    changed[_CHARACTERS] = [*attributes[_CHARACTERS]]
    changed[_CHARACTERS][termios.VQUIT] = CTRL_D
    handler = signal.signal(signal.SIGQUIT, _raise_end)
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ends:
        signal.signal(number, _raise_exit)
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
        yield
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # pressed now, it would leave the terminal changed
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(sys.stdin, termios.TCSANOW, attributes)
        signal.signal(signal.SIGQUIT, handler)
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def _raise_end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # pressed twice, it is still one end
    raise EOFError


def _raise_exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
