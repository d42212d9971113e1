"""Progress of long ops, so that a worker that computes is not taken for one that hangs.

The worker sets who is told; ops tell it when they end, and between their parts where they work in parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_report: Callable[[], None] | None = None


def report_progress_to(report: Callable[[], None] | None) -> None:
    """Set the function to call from now on; None: call nothing."""
    global _report
    _report = report


def got_on() -> None:
    """A part of an op is done."""
    if _report is not None:
        _report()


def reporting(op: Callable[P, R]) -> Callable[P, R]:
    """The op, which reports its end."""

    @functools.wraps(op)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        result = op(*args, **kwargs)
        got_on()
        return result

    return run
