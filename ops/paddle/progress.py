"""Progress of long ops, so that a busy worker is not taken for a hanging one.

The worker sets the function; ops call it at their end, and between parts.
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
    """Report that a part of an op is done."""
    if _report is not None:
        _report()


def reporting(op: Callable[P, R]) -> Callable[P, R]:
    """Return the op, changed to report its end."""

    @functools.wraps(op)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        result = op(*args, **kwargs)
        got_on()
        return result

    return run
