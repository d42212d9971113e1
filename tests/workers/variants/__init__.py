"""Other shapes and options of the supported architectures, each with what transformers answers.

`variants.json` holds, per variant, a config.json in its original style, a prompt and the expected greedy tokens and
log-probabilities. The weights are not stored: they are drawn by `values`, which `make.py` (run by hand where torch and
transformers are installed) and the tests share."""

from __future__ import annotations

import zlib

import numpy as np

SCALE = 0.15


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight `name`: normal numbers that depend on the name alone; norms around 1."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32) * np.float32(SCALE)
    return drawn + np.float32(1) if "norm" in name else drawn
