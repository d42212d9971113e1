"""Decides who may join a queue that several sources fill.

Used where new requests are refused with 429: by the scheduler (for requests that wait for a slot), by the tokenizer processes
(for their helpers) and by the api processes (for a tokenizer's ring, and for calls in progress). A source is an API key or an
address (`source_of` of `api/access.py`); requests without either share one source.
"""

from __future__ import annotations


def has_room(num_own: int, num_all: int, limit: int, num_more: int = 1) -> bool:
    """Return whether a source that has `num_own` of the `num_all` in a queue may add `num_more`. A queue has places for twice
    `limit`; a source may take no more of them than it would leave free (dynamic thresholds: Choudhury and Hahne, 1998). So a
    single source has `limit`, each of s has 2 limit / (s + 1), and however much one has sent, there is room for the next."""
    return num_own + num_all + num_more <= 2 * limit
