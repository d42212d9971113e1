"""Precisions that an engine can serve in, as options; the guarantees hold in each of them."""

from __future__ import annotations

PRECISIONS: dict[str, tuple[str, ...]] = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "wint8", "--kv-cache-dtype", "int8"),
    "int4": ("--quantization", "wint4"),
}
