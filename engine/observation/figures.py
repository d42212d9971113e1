"""Rates, shares and quantiles from two snapshots of an engine.

Used by `tokamak top`, the dashboard and programs that read their JSON. Pure functions of snapshots.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from engine.config import DRAFT_METHODS, MAX_DRAFTS
from engine.messages import WeightsState
from engine.metric_labels import DEVICE_DTYPES
from engine.observation.media import MediaFigures, media_figures
from engine.observation.rank_groups import ExpertFigures, RankGroupFigures, expert_figures, rank_group_figures
from engine.observation.snapshot import Snapshot
from engine.process.topology import CACHE, SCHEDULER, actors_of, partner_of, readers_of, role_of

WINDOW_NS = 10_000_000_000  # distributions are over about this long
STEP_PARTS = ("schedule", "dispatch", "run", "sample", "return")
LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
}


class Distribution(msgspec.Struct, frozen=True):
    """Times in seconds; None if nothing was observed."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    is_recent: bool  # of the window; otherwise since the start


class StepPart(msgspec.Struct, frozen=True):
    time: Distribution
    share: float | None  # of the mean step


class DraftFigures(msgspec.Struct, frozen=True):
    """Outcome of draft tokens, in the window or since the start."""

    methods: dict[str, float | None]  # share of accepted drafts by method, for methods that made some
    accepted: list[float]  # by position: share of accepted drafts among rows with a draft there
    tokens_per_row: float  # for rows that continue an answer
    num_resting: int  # number of these rows in the last step without drafts
    draft_share: float | None  # share of step time spent making drafts


class DeviceFigures(msgspec.Struct, frozen=True):
    """Capabilities of the ranks' devices."""

    has_graphs: bool
    keeps_cache: bool  # the KV cache survives the rank
    dtypes: list[str]  # types that it multiplies in
    num_uncaptured: int  # step sizes that could not be captured, over all ranks
    num_fallbacks: int  # fused ops that gave wrong results
    memory_bytes: int  # of all ranks' tensors
    captured_share: float | None  # of all steps; None: no rank captures
    copies_per_step: float | None  # both ways
    wait_share: float | None  # of step time, waiting for results of the device


class Figures(msgspec.Struct, frozen=True):
    """Figures for people and scripts, from up to three snapshots (see `figures`). Rates are per second, shares 0 to 1; None
    without data.

    The parts of a step add up to the time from its decision to its handled result. Two steps overlap, so the wait of one for
    the other is included in `dispatch`, and the sum is greater than the time between two results.
    """

    interval_s: float  # of the rates; 0: there was only one snapshot
    window_s: float  # of the recent distributions
    engine_state: str  # if replicas differ, all of them: "normal, loading"
    weight_version: str  # the same
    num_running: int
    num_waiting: int
    num_open: int  # sequences held by the api process
    num_kv_blocks: int
    num_used_kv_blocks: int
    num_cached_kv_blocks: int
    prefix_hit_share: float | None
    num_preemptions: int
    num_aborted: int
    num_resubmissions: int
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    computed_tokens_per_s: float | None  # by the ranks: prefill, decode and recomputation
    requests_per_s: float | None  # finished sequences
    steps_per_s: float | None
    step_mean_s: float | None
    step: dict[str, StepPart]
    rank_idle_share: float | None  # of the time in which requests were running, over all ranks
    worker_idle_share: dict[str, float | None]  # the same of each worker
    replica: dict[str, str]  # replica of each actor, if there are several: "1", or with its tensor rank "1.0"
    routed: dict[str, int]  # sequences by the reason for their replica
    rank_groups: list[RankGroupFigures]  # none if each rank computes alone
    experts: ExpertFigures | None  # None: ranks share none
    device: DeviceFigures | None  # common capabilities of all ranks' devices; None: no rank has reported any
    media: MediaFigures | None  # None: nothing was encoded
    drafts: DraftFigures | None  # None: none were verified
    latency: dict[str, Distribution]
    cpu_share: dict[str, float | None]  # by actor; 1 is one core
    ring_records_per_s: dict[str, float | None]  # by "sender>receiver"


def _device(now: Snapshot, window: Snapshot | None) -> DeviceFigures | None:
    dtypes = [dtype for dtype in DEVICE_DTYPES if now.distinct("device_multiplies", dtype=dtype) == [1]]
    if not dtypes:
        return None
    return DeviceFigures(
        has_graphs=now.distinct("device_has_graphs") == [1],
        keeps_cache=now.distinct("device_keeps_cache") == [1],
        dtypes=dtypes,
        num_uncaptured=int(now.total("uncaptured_step_sizes")),
        num_fallbacks=int(now.total("op_fallbacks_total")),
        memory_bytes=int(now.total("device_memory_bytes")),
        captured_share=_captured_share(now),
        copies_per_step=_share("device_copies_total", "worker_steps_total", now, window),
        wait_share=_share("device_wait_seconds_total", "worker_busy_seconds_total", now, window),
    )


def _captured_share(now: Snapshot) -> float | None:
    """Return the share of captured steps since the start, if any size was captured."""
    if not now.total("captured_step_sizes"):
        return None
    found = (now.histogram(f"{kind}_step_rows") for kind in ("captured", "eager"))
    captured, eager = (sum(each.buckets) if each is not None else 0 for each in found)
    return captured / (captured + eager) if captured + eager else None


def figures(now: Snapshot, tick: Snapshot | None = None, window: Snapshot | None = None) -> Figures:
    """Return rates since `tick` and distributions since `window`; without them no rates, and distributions since the start."""
    interval_s = (now.taken_ns - tick.taken_ns) / 1e9 if tick else 0.0

    def rate(name: str) -> float | None:
        return _rate(now.total(name), tick.total(name), interval_s) if tick else None

    step = {part: _distribution(f"step_{part}_seconds", now, window) for part in STEP_PARTS}
    step_mean_s = sum(time.mean or 0.0 for time in step.values()) or None
    num_kv_blocks = int(now.total("num_kv_blocks"))
    return Figures(
        interval_s=interval_s,
        window_s=(now.taken_ns - window.taken_ns) / 1e9 if window else 0.0,
        engine_state=", ".join(WeightsState(int(state)).name.lower() for state in now.distinct("engine_state")),
        weight_version=", ".join(f"{version:g}" for version in now.distinct("engine_weight_version")),
        num_running=int(now.total("num_requests_running")),
        num_waiting=int(now.total("num_requests_waiting")),
        num_open=int(now.total("open_requests")),
        num_kv_blocks=num_kv_blocks,
        num_used_kv_blocks=num_kv_blocks - int(now.total("num_free_kv_blocks")),
        num_cached_kv_blocks=int(now.total("num_cached_kv_blocks")),
        prefix_hit_share=_share("prefix_cache_hits_total", "prefix_cache_queries_total", now, window),
        num_preemptions=int(now.total("num_preemptions_total")),
        num_aborted=int(now.total("requests_aborted_total")),
        num_resubmissions=int(now.total("resubmissions_total")),
        prompt_tokens_per_s=rate("prompt_tokens_total"),
        generation_tokens_per_s=rate("generation_tokens_total"),
        computed_tokens_per_s=rate("scheduled_tokens_total"),
        requests_per_s=rate("request_success_total"),
        steps_per_s=rate("steps_total"),
        step_mean_s=step_mean_s,
        step={part: StepPart(time, (time.mean or 0.0) / step_mean_s if step_mean_s else None) for part, time in step.items()},
        rank_idle_share=_idle_share(now, window),
        worker_idle_share={
            actor.name: _idle_share(now, window, actor=actor.name) for actor in now.actors if role_of(actor.name) == "worker"
        },
        replica=_replicas([actor.name for actor in now.actors]),
        routed={
            str(row.labels["reason"]): int(now.total(row.name, reason=row.labels["reason"]))
            for row in now.rows
            if row.name == "requests_routed_total"
        },
        rank_groups=rank_group_figures(now, window),
        device=_device(now, window),
        experts=expert_figures(now),
        media=media_figures(now),
        drafts=_draft_figures(now, window),
        latency={key: _distribution(name, now, window) for key, name in LATENCIES.items()},
        cpu_share=_cpu_shares(now, tick, interval_s),
        ring_records_per_s=_ring_rates(now, tick, interval_s),
    )


class History:
    """The latest snapshots: enough for the rates, the window and the sparkline."""

    def __init__(self, window_ns: int = WINDOW_NS, num_rates: int = 120) -> None:
        self.generation_rates: deque[float] = deque(maxlen=num_rates)  # tokens per second, the latest last
        self._window_ns = window_ns
        self._snapshots: deque[Snapshot] = deque()

    def add(self, now: Snapshot) -> Figures:
        """Add a snapshot and return the figures from it and those before it."""
        while self._snapshots and now.taken_ns - self._snapshots[0].taken_ns > self._window_ns:
            self._snapshots.popleft()
        tick = self._snapshots[-1] if self._snapshots else None
        window = self._snapshots[0] if self._snapshots else None
        self._snapshots.append(now)
        result = figures(now, tick, window)
        if result.generation_tokens_per_s is not None:
            self.generation_rates.append(result.generation_tokens_per_s)
        return result


def report(run: dict[str, Any], now: Snapshot, derived: Figures) -> dict[str, Any]:
    """Return the document of `tokamak top --json`: all metrics and the derived figures."""
    return {"run": run, "derived": msgspec.to_builtins(derived), **msgspec.to_builtins(now)}


def _replicas(names: list[str]) -> dict[str, str]:
    schedulers = actors_of(SCHEDULER, names)
    replicas: dict[str, str] = {}
    for index, scheduler in enumerate(schedulers if len(schedulers) > 1 else ()):
        replicas[scheduler] = replicas[partner_of(scheduler, CACHE, names)] = str(index)
        ranks = readers_of(scheduler, names)
        replicas |= {rank: f"{index}.{tensor_rank}" for tensor_rank, rank in enumerate(ranks)}
    return replicas


def _rate(now: float, before: float, seconds: float) -> float | None:
    """Return a rate per second. A counter that decreased (its memory was recreated) counts from 0."""
    if seconds <= 0:
        return None
    return (now - before if now >= before else now) / seconds


def _distribution(name: str, now: Snapshot, window: Snapshot | None) -> Distribution:
    """Return the distribution in the window, or since the start if nothing was observed in the window."""
    whole = now.histogram(name)
    if whole is None:
        return Distribution(0, None, None, None, None, False)
    earlier = window.histogram(name) if window else None
    recent = whole.since(earlier) if earlier else None
    chosen = recent if recent and recent.count else whole
    p50, p90, p99 = (chosen.quantile(share) for share in (0.5, 0.9, 0.99))
    return Distribution(chosen.count, chosen.mean, p50, p90, p99, chosen is recent)


def _draft_figures(now: Snapshot, window: Snapshot | None) -> DraftFigures | None:
    if not now.total("spec_decode_num_draft_tokens_total"):
        return None
    earlier = window
    if window and now.total("spec_decode_num_rows_total") == window.total("spec_decode_num_rows_total"):
        earlier = None

    def grown(name: str, **labels: str) -> float:
        return now.total(name, **labels) - (earlier.total(name, **labels) if earlier else 0)

    methods = {}
    for method in DRAFT_METHODS:
        if now.total("spec_decode_num_draft_tokens_by_method_total", method=method):
            num_drafts = grown("spec_decode_num_draft_tokens_by_method_total", method=method)
            num_accepted = grown("spec_decode_num_accepted_tokens_by_method_total", method=method)
            methods[method] = num_accepted / num_drafts if num_drafts else None
    accepted = []
    for place in map(str, range(MAX_DRAFTS)):
        num_drafts = grown("spec_decode_num_draft_tokens_per_pos_total", position=place)
        if not num_drafts:
            break
        accepted.append(grown("spec_decode_num_accepted_tokens_per_pos_total", position=place) / num_drafts)
    num_rows, num_accepted = grown("spec_decode_num_rows_total"), grown("spec_decode_num_accepted_tokens_total")
    busy_s = grown("worker_busy_seconds_total") + grown("spec_decode_draft_seconds_total")
    return DraftFigures(
        methods,
        accepted,
        1 + num_accepted / num_rows if num_rows else 1.0,
        int(now.total("spec_decode_num_resting")),
        grown("spec_decode_draft_seconds_total") / busy_s if busy_s else None,
    )


def _share(part: str, whole: str, now: Snapshot, window: Snapshot | None) -> float | None:
    """Return one counter's growth as a share of another's, in the window or since the start."""
    for earlier in (window, None):
        num_whole = now.total(whole) - (earlier.total(whole) if earlier else 0)
        if num_whole > 0:
            return (now.total(part) - (earlier.total(part) if earlier else 0)) / num_whole
    return None


def _idle_share(now: Snapshot, window: Snapshot | None, **labels: str) -> float | None:
    """Return idle time between steps as a share of idle and step time, in the window or, if it saw no step, since the start."""
    for earlier in (window, None):
        idle_s, busy_s = (
            now.total(name, **labels) - (earlier.total(name, **labels) if earlier else 0)
            for name in ("worker_idle_seconds_total", "worker_busy_seconds_total")
        )
        if idle_s + busy_s > 0:
            return idle_s / (idle_s + busy_s)
    return None


def _cpu_shares(now: Snapshot, tick: Snapshot | None, interval_s: float) -> dict[str, float | None]:
    before = {actor.name: actor for actor in tick.actors} if tick else {}
    shares: dict[str, float | None] = {}
    for actor in now.actors:
        old = before.get(actor.name)
        is_same = old is not None and old.pid == actor.pid
        shares[actor.name] = None
        if old is not None and is_same and actor.cpu_seconds is not None and old.cpu_seconds is not None:
            shares[actor.name] = _rate(actor.cpu_seconds, old.cpu_seconds, interval_s)
    return shares


def _ring_rates(now: Snapshot, tick: Snapshot | None, interval_s: float) -> dict[str, float | None]:
    before = {(ring.sender, ring.receiver): ring.num_records for ring in tick.rings} if tick else {}
    rates: dict[str, float | None] = {}
    for ring in now.rings:
        old = before.get((ring.sender, ring.receiver))
        rates[f"{ring.sender}>{ring.receiver}"] = None if old is None else _rate(ring.num_records, old, interval_s)
    return rates
