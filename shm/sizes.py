"""Numbers of bytes in messages."""

from __future__ import annotations

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size_text(num_bytes: float) -> str:
    """Return `19.3 GiB`, `512 MiB`, `24.02 KiB`, `17 bytes`: at most two decimals."""
    for unit, name in _UNITS:
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{num_bytes:g} bytes"
