"""Errors by which Paddle refuses an op. Imports nothing, so that any code that tries ops may use it."""

from __future__ import annotations


def cause_of(error: BaseException) -> str:
    """The line that tells it: of Paddle's own errors that of their kind, else the last one that is no hint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "[Hint" not in line]
    return next((line for line in lines if line.startswith("(")), lines[-1] if lines else repr(error))
