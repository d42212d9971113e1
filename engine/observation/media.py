"""Figures about images and video. Pure; used by `figures.py`."""

from __future__ import annotations

import msgspec

from engine.observation.snapshot import Snapshot


class MediaFigures(msgspec.Struct, frozen=True):
    """Totals since the start. Seconds are sums, over all ranks that encode."""

    num_calls: int
    num_units: int  # images and parts of videos
    hit_share: float | None  # of units looked up in the encoder cache
    num_evictions: int
    fetch_s: float  # fetching links
    prepare_s: float  # inspecting files
    decode_s: float  # decoding pixels
    encode_s: float


def media_figures(now: Snapshot) -> MediaFigures | None:
    """Return the figures; None: nothing was encoded or inspected."""
    if not any(row.name == "encoder_calls_total" and row.value for row in now.rows):
        return None
    num_queries = now.total("mm_cache_queries_total")
    return MediaFigures(
        num_calls=int(now.total("encoder_calls_total")),
        num_units=int(now.total("encoder_units_total")),
        hit_share=now.total("mm_cache_hits_total") / num_queries if num_queries else None,
        num_evictions=int(now.total("encoder_evictions_total")),
        fetch_s=_seconds(now, "media_fetch_seconds"),
        prepare_s=_seconds(now, "media_prepare_seconds"),
        decode_s=_seconds(now, "media_decode_seconds"),
        encode_s=now.total("encoder_seconds_total"),
    )


def _seconds(now: Snapshot, name: str) -> float:
    found = now.histogram(name)
    return found.sum if found else 0.0
