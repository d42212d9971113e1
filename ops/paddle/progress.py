"""Who hears that a long op gets on. Set by the worker; called between the parts of ops that work in parts."""

from __future__ import annotations

from collections.abc import Callable

_report: Callable[[], None] | None = None


def report_progress_to(report: Callable[[], None] | None) -> None:
    """What to call from now on; None: nothing."""
    global _report
    _report = report


def got_on() -> None:
    """A part of an op is done."""
    if _report is not None:
        _report()
