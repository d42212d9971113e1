"""Builds a regex for integers within bounds of any size. Pure.

Used by `schema.py`: llguidance reads bounds as floating-point numbers, which are not exact beyond 2^53.
"""

from __future__ import annotations


def pattern_of(low: int | None, high: int | None) -> str:
    """Return a regex for the integers from `low` to `high`, inclusive; None: no bound. "" if there are none."""
    if low is not None and high is not None and low > high:
        return ""
    negative = _natural(max(1, -high) if high is not None else 1, -low if low is not None else None)
    natural = _natural(max(0, low) if low is not None else 0, high)
    parts = ([f"-({negative})"] if negative else []) + ([natural] if natural else [])
    return "|".join(parts)


def _natural(low: int, high: int | None) -> str:
    """Return the regex for `low` of at least 0."""
    if high is not None and low > high:
        return ""
    if high is None:
        longer = f"[1-9][0-9]{{{len(str(low))},}}"
        return f"{_natural(low, 10 ** len(str(low)) - 1)}|{longer}"
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = min(high, 10**length - 1)
        parts.append(_same_length(str(first), str(last)))
    return "|".join(parts)


def _same_length(low: str, high: str) -> str:
    """Return the regex for numbers with as many digits as both `low` and `high`."""
    if not low:
        return ""
    rest = len(low) - 1
    if low[0] == high[0]:
        inner = _same_length(low[1:], high[1:])
        return low[0] + (f"({inner})" if "|" in inner else inner)
    first, last = int(low[0]), int(high[0])
    parts = []
    if int(low[1:] or 0) > 0:
        parts.append(_same_length(low, low[0] + "9" * rest))
        first += 1
    is_cut = high[1:] != "9" * rest
    last -= is_cut
    if first <= last:
        digits = str(first) if first == last else f"[{first}-{last}]"
        parts.append(digits + (f"[0-9]{{{rest}}}" if rest else ""))
    if is_cut:
        parts.append(_same_length(high[0] + "0" * rest, high))
    return "|".join(parts)
