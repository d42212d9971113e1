"""Choice of a kernel variant for each part of the ops, by measured speed (`rates.py`), not by name.

Pure. Each part can use its own variant: the linears of each weight format, and attention, which is timed with each type of keys
and values. A part uses one variant for all numbers of rows, so that a row's bits never depend on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

BASE = "base"  # everything else: norms, rotations, activations, sampling
LINEARS = ("float32", "bfloat16", "int8", "int4", "float4")
ATTENTION = "attention"
KV_TYPES = ("float32", "bfloat16", "int8")
TIMED = (*LINEARS, *(f"{ATTENTION} {dtype}" for dtype in KV_TYPES))  # timed parts
TIE = 1.05  # rates that differ by less count as equal
NUM_CASES = {**dict.fromkeys(LINEARS, 3), ATTENTION: 2}  # 1, 16 and 128 rows; one query and a prefill's tile

Times = Mapping[str, Sequence[float]]  # variant -> seconds of each case, the same cases for all


def choose(times: Times, order: Sequence[str]) -> str:
    """Return the variant with the best score; of ties, the last in `order`, which lists the timed ones.

    A score is the geometric mean of the rates in all cases: twice as fast at one row makes up for half as fast at 128. So
    decode (1 and 16 rows) counts two thirds of a linear, prefill (128 rows) one.
    """
    scores = {variant: score(times[variant]) for variant in order}
    best = max(scores.values())
    return [variant for variant in order if scores[variant] * TIE >= best][-1]


def score(seconds: Sequence[float]) -> float:
    """Return the geometric mean of the rates."""
    return math.exp(-sum(math.log(each) for each in seconds) / len(seconds))


def kernels_of(chosen: Mapping[str, str], base: str, kv_dtype: str) -> dict[str, str]:
    """Return the variant of each part of an engine with `kv_dtype` keys and values; `chosen` has one for each of TIMED."""
    return {BASE: base, **{part: chosen[part] for part in LINEARS}, ATTENTION: chosen[f"{ATTENTION} {kv_dtype}"]}
