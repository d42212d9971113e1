"""`GET /metrics`: every row of the counters file, the actor table and the rings, in Prometheus's text format.

Runs in the api process. Names and meanings are the rows' own (`engine/metrics.py`), printed with the prefix `tokamak:`; every
sample carries `model_name`, and `actor` says who counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.exchange import Exchange
from shm.counters import Counters
from shm.inspection import RingSnapshot, rings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "tokamak:"

Row = Mapping[str, Any]  # as in Counters.snapshot()["metrics"]


async def metrics(request: Request) -> Response:
    """The route."""
    services = Exchange.of(request).services
    adapters = {} if services.model.adapters is None else {each.slot: each.name for each in services.model.adapters.adapters}
    max_loras = services.context.config.max_loras
    name = services.model.names[0]
    text = exposition(services.context.counters, rings(services.context.run.run_id), name, adapters, max_loras)
    return Response(text, media_type=CONTENT_TYPE)


def exposition(
    counters: Counters,
    ring_snapshots: Sequence[RingSnapshot],
    model_name: str,
    adapters: Mapping[int, str] | None = None,
    max_loras: int = 0,
) -> str:
    """`adapters`: their names, by their slots of `max_loras`."""
    snapshot = counters.snapshot()
    rows = [
        *snapshot["metrics"],
        *_actor_rows(snapshot["actors"], time.monotonic_ns()),
        *_error_rows(snapshot["errors"]),
        *_ring_rows(ring_snapshots),
        *(_adapter_rows(snapshot["metrics"], adapters or {}, max_loras) if max_loras else ()),
    ]
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row["name"], []).append(row)
    lines = [line for name, family in families.items() for line in _family(PREFIX + name, family, model_name)]
    return "\n".join(lines) + "\n"


def _family(name: str, rows: Sequence[Row], model_name: str) -> Iterable[str]:
    yield f"# HELP {name} {_escaped_help(rows[0]['help'])}"
    yield f"# TYPE {name} {rows[0]['kind']}"
    for row in rows:
        labels = {"model_name": model_name, **row["labels"]}
        if row["kind"] == "histogram":
            yield from _histogram(name, labels, row)
        else:
            yield f"{name}{_labels(labels)} {_number(row['value'])}"


def _histogram(name: str, labels: Mapping[str, str], row: Row) -> Iterable[str]:
    total = 0
    for bound, count in zip([*row["bounds"], math.inf], row["buckets"], strict=True):
        total += count
        yield f"{name}_bucket{_labels({**labels, 'le': _number(bound)})} {total}"
    yield f"{name}_sum{_labels(labels)} {_number(row['sum'])}"
    yield f"{name}_count{_labels(labels)} {total}"


def _actor_rows(actors: Iterable[Mapping[str, Any]], now_ns: int) -> Iterable[Row]:
    for actor in actors:
        own = {"actor": actor["name"]}
        age_s = max(0, now_ns - actor["heartbeat_ns"]) / 1e9
        yield _gauge("actor_up", "1 where the actor is READY or RUNNING.", own, actor["state"] in ("READY", "RUNNING"))
        yield _gauge("actor_state", "1, with the actor's state as a label.", {**own, "state": actor["state"]}, 1)
        yield _gauge("actor_epoch", "Incarnation of the actor, from 1.", own, actor["epoch"])
        yield _gauge("actor_heartbeat_age_seconds", "Since the work loop last came round.", own, age_s)


def _error_rows(errors: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    counts: dict[str, int] = {}
    for error in errors:
        counts[error["actor"]] = counts.get(error["actor"], 0) + error["count"]
    for actor, count in counts.items():
        yield {**_gauge("errors_total", "Errors in the error log.", {"actor": actor}, count), "kind": "counter"}


def _ring_rows(snapshots: Iterable[RingSnapshot]) -> Iterable[Row]:
    for ring in snapshots:
        ends = {"receiver": ring.receiver, "sender": ring.sender}
        yield _gauge("ring_capacity_bytes", "Size of a ring.", ends, ring.capacity_bytes)
        yield _gauge("ring_fill_bytes", "Bytes on a ring that its receiver has not taken yet.", ends, ring.fill_bytes)
        yield {**_gauge("ring_records_total", "Records sent over a ring.", ends, ring.num_records), "kind": "counter"}
        yield {**_gauge("ring_full_waits_total", "Sends that found a ring full.", ends, ring.num_full_waits), "kind": "counter"}


def _adapter_rows(rows: Iterable[Row], adapters: Mapping[int, str], max_loras: int) -> Iterable[Row]:
    """As vLLM has it: which adapters have samples that run or wait, in labels, and the time."""
    labels = {"max_lora": str(max_loras)}
    found = [
        (row["name"], int(row["labels"]["adapter_slot"])) for row in rows if row["name"].startswith("adapter_") and row["value"]
    ]
    for what in ("running", "waiting"):
        slots = sorted({slot for name, slot in found if name == f"adapter_requests_{what}"})
        labels[f"{what}_lora_adapters"] = ",".join(adapters[slot] for slot in slots if slot in adapters)
    yield _gauge("lora_requests_info", "The adapters that have samples running or waiting.", labels, time.time())


def _gauge(name: str, help: str, labels: dict[str, str], value: float) -> dict[str, Any]:
    return {"name": name, "kind": "gauge", "help": help, "labels": labels, "value": value}


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
