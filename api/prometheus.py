"""`GET /metrics`: all metrics in the counters file, the actor table and the rings, as Prometheus text or OpenMetrics, whichever
the client requests.

Runs in the api process, outside its event loop; its imports happen on first use. Names and meanings are defined in
`engine/metrics.py` and printed with the prefix `tokamak:` (`--metrics-prefix`); every sample has the labels `model_name` and
`actor`.
"""

from __future__ import annotations

import asyncio
import math
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from api.fingerprint import Fingerprints
from api.model import ServedModel
from engine.config import EngineConfig
from engine.installation import package_version
from engine.process.context import ActorContext
from engine.process.topology import places_of
from shm.counters import Counters
from shm.inspection import RingSnapshot, rings

if TYPE_CHECKING:
    from prometheus_client import Metric

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
OPEN_METRICS_TYPE = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"
FORMER_NAMES = {  # until the next release
    "empty_rank_group_steps_total": "empty_gang_steps_total",
    "engine_weight_version": "weight_version",
    "rank_group_epoch": "gang_epoch",
    "rank_group_steps_total": "gang_steps_total",
    "rank_weight_version": "weights_version",
}
SHARE = 0.2  # of a core
BURST_S = 0.5  # that may be used at once before requests wait
HANDOVER_S = 20e-6
SPARSE = ("http_request_duration_seconds",)  # left out while nothing was counted

Row = Mapping[str, Any]  # as in Counters.snapshot()["metrics"]


class Renderings:
    """Renders the metrics in one api process, outside its event loop, one at a time: each begins after the requests that it
    answers.

    Rendering takes milliseconds of CPU time, which streams then lack, and needs no key. So all requests that arrive during one
    rendering share the next one, and in the long run rendering takes `SHARE` of a core: frequent requests wait.
    """

    def __init__(self, context: ActorContext, model: ServedModel, fingerprints: Fingerprints) -> None:
        self.context = context
        self.fingerprints = fingerprints
        self._model = model
        self._next: dict[bool, asyncio.Task[bytes]] = {}  # by `is_open`; those that have not begun
        self._turn = asyncio.Lock()
        self._paid_s = 0.0  # on the loop's clock: when the used time is `SHARE` of the elapsed time

    async def text(self, is_open: bool) -> bytes:
        """Return the current metrics in Prometheus's text format or OpenMetrics."""
        task = self._next.get(is_open)
        if task is None:
            task = self._next[is_open] = asyncio.create_task(self._made(is_open))
        return await asyncio.shield(task)  # other requests may wait for it too

    async def _made(self, is_open: bool) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._paid_s - BURST_S - loop.time())
            del self._next[is_open]
            adapters = {} if self._model.adapters is None else {each.slot: each.name for each in self._model.adapters.adapters}
            text, taken_s = await asyncio.to_thread(
                rendered, self.context, self._model.names[0], is_open, adapters, self.fingerprints
            )
            self._paid_s = max(self._paid_s, loop.time()) + taken_s / SHARE
            return text


def rendered(
    context: ActorContext, model_name: str, is_open: bool, adapters: Mapping[int, str], fingerprints: Fingerprints
) -> tuple[bytes, float]:
    """Return the text, and the CPU seconds it took, without those of the first imports."""
    from prometheus_client.exposition import generate_latest
    from prometheus_client.openmetrics.exposition import ALLOWUTF8  # otherwise it replaces the colon in names by an underscore
    from prometheus_client.openmetrics.exposition import generate_latest as as_open_metrics

    begin_s = time.thread_time()
    config = context.config
    look = Look(
        context.counters,
        rings(context.run.run_id),
        information(config, fingerprints.current()),
        {"model_name": model_name},
        config.metrics_prefix,
        adapters,
        config.max_loras,
    )
    text = as_open_metrics(look, ALLOWUTF8) if is_open else generate_latest(look)  # type: ignore[no-untyped-call]
    return text, time.thread_time() - begin_s


def information(config: EngineConfig, system_fingerprint: str = "") -> list[Row]:
    """Return facts that do not change while the engine runs: gauges with the value 1 and labels."""
    build = {
        "version": package_version(),
        "python_version": platform.python_version(),
        "device": config.device,
        "ops": config.ops,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kernels": config.kernels_text,
        "system_fingerprint": system_fingerprint,
    }
    cache = {
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "num_gpu_blocks": config.num_kv_blocks,
        "num_kv_blocks": config.num_kv_blocks,
        "kv_cache_bytes": config.kv_cache_bytes,
        "max_model_len": config.max_model_len,
    }
    return [
        _gauge("build_info", "1, with the running configuration as labels.", build, 1),
        _gauge("cache_config_info", "1, with the KV cache configuration of each replica as labels.", cache, 1),
    ]


class Look:
    """All metrics at one time, for prometheus_client's encoders."""

    def __init__(
        self,
        counters: Counters,
        ring_snapshots: Sequence[RingSnapshot],
        infos: Sequence[Row],
        labels: Mapping[str, str],
        prefix: str,
        adapters: Mapping[int, str] | None = None,
        max_loras: int = 0,
    ) -> None:
        """`labels`: of every sample. `adapters`: their names, by slot of `max_loras`."""
        snapshot = counters.snapshot()
        rows = [
            *infos,
            *(row for row in snapshot["metrics"] if row["name"] not in SPARSE or row["count"]),
            *_actor_rows(_with_process(snapshot["actors"]), time.monotonic_ns()),
            *_error_rows(snapshot["errors"]),
            *_ring_rows(ring_snapshots),
            *(_adapter_rows(snapshot["metrics"], adapters or {}, max_loras) if max_loras else ()),
        ]
        self._labels, self._prefix = labels, prefix
        self._families: dict[str, list[Row]] = {}
        for row in rows:
            self._families.setdefault(row["name"], []).append(row)

    def collect(self) -> Iterator[Metric]:
        """Yield one family at a time. In between the GIL is released for a moment: otherwise the event loop would wait
        `sys.getswitchinterval()` for it each time that it has something to do."""
        for name, rows in self._families.items():
            time.sleep(HANDOVER_S)
            yield self._family(name, rows, rows[0]["help"])
            if former := FORMER_NAMES.get(name):
                yield self._family(former, rows, f"Former name of {self._prefix}:{name}.")

    def _family(self, name: str, rows: Sequence[Row], help: str) -> Metric:
        from prometheus_client import Metric

        kind = rows[0]["kind"]
        if kind == "counter":
            name = name.removesuffix("_total")
        family = Metric(f"{self._prefix}:{name}", help, kind)
        for row in rows:
            labels = {**self._labels, **{label: str(value) for label, value in row["labels"].items()}}
            if kind == "histogram":
                _add_histogram(family, labels, row)
            else:
                family.add_sample(family.name + "_total" * (kind == "counter"), labels, row["value"])
        return family


def _add_histogram(family: Metric, labels: dict[str, str], row: Row) -> None:
    total = 0
    for bound, count in zip([*row["bounds"], math.inf], row["buckets"], strict=True):
        total += count
        le = "+Inf" if math.isinf(bound) else repr(float(bound))
        family.add_sample(f"{family.name}_bucket", {**labels, "le": le}, total)
    family.add_sample(f"{family.name}_count", labels, total)
    family.add_sample(f"{family.name}_sum", labels, row["sum"])


def _with_process(actors: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the actors without a router's places, which have no process."""
    places = places_of(actor["name"] for actor in actors)
    return (actor for actor in actors if actor["name"] not in places)


def _actor_rows(actors: Iterable[Mapping[str, Any]], now_ns: int) -> Iterable[Row]:
    for actor in actors:
        own = {"actor": actor["name"]}
        age_s = max(0, now_ns - actor["heartbeat_ns"]) / 1e9
        yield _gauge("actor_up", "1 if the actor is READY or RUNNING.", own, actor["state"] in ("READY", "RUNNING"))
        yield _gauge("actor_state", "1, with the state of the actor as a label.", {**own, "state": actor["state"]}, 1)
        yield _gauge("actor_epoch", "Epoch of the actor, starting at 1; every restart adds 1.", own, actor["epoch"])
        yield _gauge("actor_heartbeat_age_seconds", "Time since the work loop of the actor last ran.", own, age_s)


def _error_rows(errors: Iterable[Mapping[str, Any]]) -> Iterable[Row]:
    counts: dict[str, int] = {}
    for error in errors:
        counts[error["actor"]] = counts.get(error["actor"], 0) + error["count"]
    for actor, count in counts.items():
        yield {**_gauge("errors_total", "Errors in the error log.", {"actor": actor}, count), "kind": "counter"}


def _ring_rows(snapshots: Iterable[RingSnapshot]) -> Iterable[Row]:
    for ring in snapshots:
        ends = {"receiver": ring.receiver, "sender": ring.sender}
        yield _gauge("ring_capacity_bytes", "Size of a ring buffer.", ends, ring.capacity_bytes)
        yield _gauge("ring_fill_bytes", "Bytes in a ring buffer that its receiver has not read yet.", ends, ring.fill_bytes)
        yield {**_gauge("ring_records_total", "Records sent through a ring buffer.", ends, ring.num_records), "kind": "counter"}
        yield {
            **_gauge("ring_full_waits_total", "Sends into a full ring buffer.", ends, ring.num_full_waits),
            "kind": "counter",
        }


def _adapter_rows(rows: Iterable[Row], adapters: Mapping[int, str], max_loras: int) -> Iterable[Row]:
    """Return vLLM's metrics: the adapters with running or waiting sequences as labels, and the time as value."""
    labels = {"max_lora": str(max_loras)}
    found = [
        (row["name"], int(row["labels"]["adapter_slot"])) for row in rows if row["name"].startswith("adapter_") and row["value"]
    ]
    for what in ("running", "waiting"):
        slots = sorted({slot for name, slot in found if name == f"adapter_requests_{what}"})
        labels[f"{what}_lora_adapters"] = ",".join(adapters[slot] for slot in slots if slot in adapters)
    yield _gauge("lora_requests_info", "Adapters with running or waiting sequences.", labels, time.time())


def _gauge(name: str, help: str, labels: Mapping[str, object], value: float) -> dict[str, Any]:
    return {"name": name, "kind": "gauge", "help": help, "labels": labels, "value": value}
