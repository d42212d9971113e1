"""Snapshots of an engine with made-up numbers."""

from __future__ import annotations

from engine.metrics import SECONDS, STEP_SECONDS
from engine.observation.snapshot import Actor, ErrorEntry, Histogram, Ring, Row, Snapshot

SECOND_NS = 1_000_000_000
ACTORS = ("supervisor", "api0", "tokenizer0", "scheduler", "cache", "worker0")
RINGS = (
    *((name, "supervisor") for name in ACTORS[1:]),
    ("api0", "tokenizer0"),
    ("tokenizer0", "api0"),
    ("tokenizer0", "scheduler"),
    ("scheduler", "tokenizer0"),
    ("scheduler", "worker0"),
    ("scheduler", "cache"),
    ("cache", "scheduler"),
    ("worker0", "scheduler"),
)


def counter(name: str, actor: str, value: float, **labels: str) -> Row:
    return Row(name, "counter", "things", "", {"actor": actor, **labels}, value)


def histogram(name: str, actor: str, values: list[float], bounds: tuple[float, ...] = SECONDS) -> Row:
    buckets = [0] * (len(bounds) + 1)
    for value in values:
        buckets[sum(value > bound for bound in bounds)] += 1
    return Row(name, "histogram", "seconds", "", {"actor": actor}, 0, Histogram(bounds, tuple(buckets), sum(values)))


def snapshot(
    taken_s: float = 0.0, rows: list[Row] | None = None, *, is_alive: bool = True, num_records: int = 0, num_errors: int = 0
) -> Snapshot:
    actors = [
        Actor(
            name, "RUNNING", is_alive, 1, 100 + i, 0, 7, 0.04 if is_alive else 60.0, taken_s / 2 if is_alive else None, 1 << 28
        )
        for i, name in enumerate(ACTORS)
    ]
    rings = [Ring(receiver, sender, 1 << 20, 64 * i, num_records, 0) for i, (receiver, sender) in enumerate(RINGS)]
    errors = [ErrorEntry("worker0", f"error number {i}: {'long ' * 40}", 3, 120.0, 2.0 + i) for i in range(num_errors)]
    return Snapshot(int(taken_s * SECOND_NS), is_alive, rows or [], actors, rings, errors)


def busy(taken_s: float) -> Snapshot:
    """Return a snapshot of an engine under load for `taken_s` seconds: 100 generated tokens a second in steps of 10 ms."""
    num_steps = int(taken_s * 100)
    step = {"schedule": 0.0004, "dispatch": 0.0001, "run": 0.008, "sample": 0.001, "return": 0.0005}
    rows = [
        counter("num_requests_running", "scheduler", 12),
        counter("num_requests_waiting", "scheduler", 3),
        counter("num_kv_blocks", "scheduler", 1000),
        counter("num_free_kv_blocks", "scheduler", 400),
        counter("num_cached_kv_blocks", "scheduler", 250),
        counter("engine_weight_version", "scheduler", 2),
        counter("prefix_cache_queries_total", "scheduler", 1000 * taken_s),
        counter("prefix_cache_hits_total", "scheduler", 450 * taken_s),
        counter("steps_total", "scheduler", num_steps),
        counter("scheduled_tokens_total", "scheduler", 300 * taken_s),
        counter("generation_tokens_total", "api0", 60 * taken_s),
        counter("generation_tokens_total", "api1", 40 * taken_s),
        counter("prompt_tokens_total", "api0", 200 * taken_s),
        counter("request_success_total", "api0", 2 * taken_s, finished_reason="stop"),
        counter("request_success_total", "api0", 3 * taken_s, finished_reason="length"),
        counter("worker_busy_seconds_total", "worker0", 0.9 * taken_s),
        counter("worker_idle_seconds_total", "worker0", 0.1 * taken_s),
        counter("device_multiplies", "worker0", 1, dtype="float32"),
        counter("device_multiplies", "worker0", 0, dtype="bfloat16"),
        counter("device_keeps_cache", "worker0", 1),
        *(histogram(f"step_{part}_seconds", "scheduler", [time] * num_steps, STEP_SECONDS) for part, time in step.items()),
        histogram("time_to_first_token_seconds", "api0", [0.03] * int(5 * taken_s)),
        histogram("request_time_per_output_token_seconds", "api0", [0.012] * int(5 * taken_s), STEP_SECONDS),
        histogram("inter_token_latency_seconds", "api0", [0.011] * int(100 * taken_s), STEP_SECONDS),
        histogram("e2e_request_latency_seconds", "api0", [0.3] * int(5 * taken_s)),
    ]
    return snapshot(taken_s, rows, num_records=int(500 * taken_s), num_errors=8)
