"""Metrics of an engine, in the classes of vLLM's `get_metrics`. Used by `llm.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
from prometheus_client.parser import text_string_to_metric_families


class Metric(msgspec.Struct):
    name: str  # with its prefix, "tokamak:"
    labels: dict[str, str]


class Counter(Metric):
    value: int


class Gauge(Metric):
    value: float


class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # upper bound -> observations up to it


def metrics_of(text: str) -> list[Metric]:
    """Parse the text of `/metrics`."""
    return [metric for family in text_string_to_metric_families(text) for metric in _metrics_of(family)]


def _metrics_of(family: object) -> Iterator[Metric]:
    name, kind, samples = family.name, family.type, family.samples  # type: ignore[attr-defined]
    if kind == "histogram":
        found: dict[tuple[tuple[str, str], ...], Histogram] = {}
        for sample in samples:
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            one = found.setdefault(tuple(sorted(labels.items())), Histogram(name, labels, 0, 0.0, {}))
            if sample.name.endswith("_bucket"):
                one.buckets[sample.labels["le"]] = int(sample.value)
            elif sample.name.endswith("_count"):
                one.count = int(sample.value)
            elif sample.name.endswith("_sum"):
                one.sum = sample.value
        yield from found.values()
        return
    for sample in samples:
        if sample.name.endswith("_created"):
            continue
        if kind == "counter" and math.isfinite(sample.value):
            yield Counter(name, dict(sample.labels), int(sample.value))
        else:
            yield Gauge(name, dict(sample.labels), sample.value)
