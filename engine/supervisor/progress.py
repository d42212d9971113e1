"""What a user sees in the terminal between `tokamak serve` and the line `ready ...`, and what the supervisor reports later.

All of it goes to stderr; stdout carries the ready line and what follows it. In a terminal the actors are shown live, elsewhere
each change is a line.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from engine.process.log import json_line
from shm.counters import State

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_TEXT_INTERVAL_S = 2.0
_COLOURS = {State.READY: "green", State.FAILED: "red", State.DEAD: "red"}


class Progress(Protocol):
    """Where the supervisor tells what happens."""

    def show(self, states: Mapping[str, tuple[State, str]]) -> None:
        """The actors' states, with a text of theirs, while the engine starts."""

    def end(self) -> None:
        """The start is over, well or not."""

    def note(self, text: str) -> None:
        """Something worth a line: a death, a restart, a stop."""


class PlainProgress:
    """A line per change of state, and now and then one for what an actor says of its work."""

    def __init__(self, log_format: str = "text") -> None:
        self._is_json = log_format == "json"
        self._states: dict[str, State] = {}
        self._texts: dict[str, tuple[str, float]] = {}  # what was printed, and when
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
        """Nothing is left on the screen."""

    def note(self, text: str) -> None:
        _print(json_line("supervisor", "info", text).decode() if self._is_json else text)


class LiveProgress:
    """A table that changes in place, by rich (imported with the first use: the children are under way by then)."""

    def __init__(self) -> None:
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

        live = Live(console=Console(stderr=True), refresh_per_second=8)
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
        _print(text)


def terminal_progress(log_format: str) -> Progress:
    """The live one where a person looks at stderr."""
    return LiveProgress() if sys.stderr.isatty() and log_format == "text" else PlainProgress(log_format)


def _print(text: str) -> None:
    """To stderr; an engine whose terminal was closed goes on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
