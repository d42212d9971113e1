"""Nearest known name to a mistyped one. Used where options are read."""

from __future__ import annotations

from collections.abc import Iterable

LEAST_LIKENESS = 0.75  # below this, names share only a beginning or a word and mean something else


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name; empty: none is similar."""
    import difflib  # needed only for mistyped names

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=LEAST_LIKENESS)), "")
