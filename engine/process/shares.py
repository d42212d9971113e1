"""Decides whether a source may add to a queue that several sources fill.

Used where new requests are rejected with 429: by the scheduler (for requests that wait for a slot), by the tokenizer processes
(for their helpers) and by the api processes (for a tokenizer's ring, and for calls in progress). A source is an API key or an
address (`source_of` in `api/access.py`); requests without either share one source.
"""

from __future__ import annotations


def has_room(num_own: int, num_all: int, limit: int, num_more: int = 1) -> bool:
    """Return whether a source that has `num_own` of the `num_all` in a queue may add `num_more`. A queue has room for twice
    `limit`; a source may use at most as much as it leaves free (dynamic thresholds: Choudhury and Hahne, 1998). So a single
    source gets `limit`, each of s sources gets 2 limit / (s + 1), and there is always room for another source."""
    return num_own + num_all + num_more <= 2 * limit
