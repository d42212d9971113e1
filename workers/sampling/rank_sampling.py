"""Ranks of a model divide the rows to sample among them and exchange the results, because each feeds the tokens to its next
step. Used by the runner.

Each rank takes adjacent rows, so that logits need no copy. The result of a row does not depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workers.rank_group.collectives import Collectives
from workers.sampling.sampler import Scores


def exchanged(ranks: Collectives, num_rows: int, num_top: int, scored: Callable[[slice], Scores]) -> Scores:
    """Return `scored(own)` of every rank's rows, joined. `num_top`: the most that any row needs."""
    most = -(-num_rows // ranks.count)
    own = _rows_of(ranks.place, num_rows, ranks.count)
    records = np.zeros(most, _record(num_top))
    if own.start < own.stop:
        scores = scored(own)
        some = records[: own.stop - own.start]
        for name in ("token_ids", "logprobs", "ranks"):
            some[name] = getattr(scores, name)
        for name in ("top_token_ids", "top_logprobs"):
            some[name][:, : getattr(scores, name).shape[1]] = getattr(scores, name)
    everybody = ranks.all_gather(records.view(np.uint8)).view(records.dtype)
    whole = Scores.of(np.empty(num_rows, np.int32), num_top)
    for place, found in enumerate(everybody):
        rows = _rows_of(place, num_rows, ranks.count)
        for name in records.dtype.names or ():
            getattr(whole, name)[rows] = found[name][: rows.stop - rows.start]
    return whole


def _rows_of(place: int, num_rows: int, count: int) -> slice:
    return slice(-(-num_rows * place // count), -(-num_rows * (place + 1) // count))


def _record(num_top: int) -> np.dtype:
    tops = [("top_token_ids", np.int32, (num_top,)), ("top_logprobs", np.float32, (num_top,))]
    return np.dtype([("token_ids", np.int32), ("logprobs", np.float32), ("ranks", np.int32), *tops])
