"""Other shapes and options of the supported architectures, each with what transformers answers.

`variants.json` holds, per variant, a config.json in its original style, a prompt and the expected greedy tokens and
log-probabilities; `seeing.json` the same of models that see, with pictures and video. The weights are not stored: they are
drawn by `values`, which the tests share with `make.py` and `make_seeing.py` (run by hand where torch and transformers are
installed)."""

from __future__ import annotations

import re
import zlib

import numpy as np

SCALE = 0.15


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight `name`: normal numbers that depend on the name alone; norms around 1."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32) * np.float32(SCALE)
    return drawn + np.float32(1) if "norm" in name else drawn


def published_name(name: str) -> str:
    """Return the older of two names that a weight of a vision model may have."""
    return re.sub(r"^model\.(visual|vision_model)\.", r"\1.", re.sub(r"^model\.language_model\.", "model.", name))


def is_first(name: str) -> bool:
    """Return whether a weight is not of a second layer or expert, which have the shapes of the first."""
    return not re.search(r"\.[1-9]\d*\.", name)
