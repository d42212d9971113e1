"""Lines in the terminal between `tokamak serve` and `ready ...`, and later reports of the supervisor.

They go to stderr; stdout has the ready line and what follows it. In a terminal the actors are shown live, elsewhere each change
is a line. Printing never waits for a reader (`line_writer.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Protocol, cast

from engine.process.log import json_line
from engine.supervisor.line_writer import LineWriter
from shm.counters import State

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

STDERR = 2
_TEXT_INTERVAL_S = 2.0
_COLOURS = {State.READY: "green", State.FAILED: "red", State.DEAD: "red"}


class Progress(Protocol):
    """Receiver of events of a start."""

    def show(self, states: Mapping[str, tuple[State, str]]) -> None:
        """Show the actors' states and texts while the engine starts."""

    def end(self) -> None:
        """End the display of the start, successful or not."""

    def note(self, text: str) -> None:
        """Print one line: a death, a restart, a stop."""

    @property
    def num_dropped(self) -> int:
        """Lines that stderr had no room for."""

    def close(self) -> None:
        """Write waiting lines, for a second at most."""


class PlainProgress:
    """Prints a line per change of state, and now and then one for the progress text of an actor."""

    def __init__(self, log_format: str = "text") -> None:
        self._is_json = log_format == "json"
        self._stderr = LineWriter(STDERR, lambda num_dropped: self._line(_missing(num_dropped)))
        self._states: dict[str, State] = {}
        self._texts: dict[str, tuple[str, float]] = {}  # printed text and its time
        self._start_s = time.monotonic()

    def show(self, states: Mapping[str, tuple[State, str]]) -> None:
        for name, (state, text) in states.items():
            if self._states.get(name) is not state or self._is_due(name, text):
                self._states[name] = state
                self._texts[name] = text, time.monotonic()
                self.note(f"{time.monotonic() - self._start_s:6.1f} s  {name:<12} {state.name.lower():<9} {text}".rstrip())

    def _is_due(self, name: str, text: str) -> bool:
        printed, printed_s = self._texts[name]
        return text != printed and time.monotonic() - printed_s >= _TEXT_INTERVAL_S

    def end(self) -> None:
        """Do nothing: there is nothing to clean up on the screen."""

    def note(self, text: str) -> None:
        self._stderr.write(self._line(text))

    def _line(self, text: str) -> str:
        return f"{json_line('supervisor', 'info', text).decode() if self._is_json else text}\n"

    @property
    def num_dropped(self) -> int:
        return self._stderr.num_dropped

    def close(self) -> None:
        self._stderr.close()


class LiveProgress:
    """A table that is updated in place, by rich (imported on first use, when the children have been started)."""

    def __init__(self) -> None:
        self._stderr = LineWriter(STDERR, lambda num_dropped: f"{_missing(num_dropped)}\n")
        self._live: Live | None = None
        self._start_s = time.monotonic()
        self._shown: dict[str, tuple[State, str]] = {}

    def show(self, states: Mapping[str, tuple[State, str]]) -> None:
        if self._live is None:
            self._live = self._begin()
        self._shown = dict(states)
        self._live.update(self._table(), refresh=False)

    def _begin(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        live = Live(console=Console(file=cast("IO[str]", _Terminal(self._stderr))), refresh_per_second=8)
        live.start()
        return live

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for name, (state, text) in self._shown.items():
            table.add_row(name, Text(state.name.lower(), style=_COLOURS.get(state, "yellow")), Text(text))
        table.add_row("", f"{time.monotonic() - self._start_s:.1f} s", "")
        return table

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        self._stderr.write(f"{text}\n")

    @property
    def num_dropped(self) -> int:
        return self._stderr.num_dropped

    def close(self) -> None:
        self._stderr.close()


class _Terminal:
    """The file that rich writes to."""

    encoding = "utf-8"

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def write(self, text: str) -> int:
        self._writer.write(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the writer's thread writes as soon as it can."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDERR


def terminal_progress(log_format: str) -> Progress:
    """Return the live display if stderr is a terminal, else plain lines."""
    return LiveProgress() if sys.stderr.isatty() and log_format == "text" else PlainProgress(log_format)


def _missing(num_dropped: int) -> str:
    return f"{num_dropped} log lines of the supervisor were dropped: stderr was not read"
