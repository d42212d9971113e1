"""Nearest known name to a mistyped one. Used where options are read."""

from __future__ import annotations

from collections.abc import Iterable

LEAST_LIKENESS = 0.75  # below it, names share a beginning or a word and mean something else


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like it; empty: none is."""
    import difflib  # of use to those alone who mistyped

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=LEAST_LIKENESS)), "")
