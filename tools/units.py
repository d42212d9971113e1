"""Human-readable numbers for narrow columns. Used by the terminal tools."""

from __future__ import annotations

SPARKS = " ▁▂▃▄▅▆▇█"
MISSING = "-"


def seconds(value: float | None) -> str:
    """Three digits and a unit, from microseconds to hours: "850us", "1.23ms", "45.0s", "3m12s", "5h07m"."""
    if value is None:
        return MISSING
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f}us"
    if value < 0.9995:
        return f"{_three_digits(value * 1e3)}ms"
    if value < 99.95:
        return f"{_three_digits(value)}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 100 else f"{hours // 24}d{hours % 24:02}h"


def count(value: float | None) -> str:
    """Three digits and a decimal prefix: "7", "0.35", "812", "1.23k", "45.0M"."""
    if value is None:
        return MISSING
    if value == int(value) and value < 1000:
        return str(int(value))
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return _three_digits(value) + prefix
        value /= 1000
    return f"{value:.0f}T"


def size(num_bytes: int | None) -> str:
    """Three digits and a binary prefix: "512B", "1.23M"."""
    if num_bytes is None:
        return MISSING
    if num_bytes < 1000:
        return f"{num_bytes}B"
    value = float(num_bytes)
    for prefix in ("K", "M", "G"):
        value /= 1024
        if value < 999.5:
            return _three_digits(value) + prefix
    return f"{_three_digits(value / 1024)}T"


def share(value: float | None) -> str:
    """Percent."""
    return MISSING if value is None else f"{100 * value:.0f}%"


def sparkline(values: list[float], width: int) -> str:
    """Return the last `width` values as bars from 0 to their maximum."""
    latest = values[-width:] if width > 0 else []
    top = max(latest, default=0.0)
    if top <= 0:
        return ""
    return "".join(SPARKS[min(8, int(8 * value / top + 0.999))] for value in latest)


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
