"""Errors by which Paddle refuses an op. Imports nothing, so that any code that tries ops can use it."""

from __future__ import annotations


def cause_of(error: BaseException) -> str:
    """Return the line with the cause: that of Paddle's error type, otherwise the last one that is not a hint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "[Hint" not in line]
    return next((line for line in lines if line.startswith("(")), lines[-1] if lines else repr(error))
