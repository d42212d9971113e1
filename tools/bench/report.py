"""Report of a load run: the numbers of its JSON file, and its terminal table.

Runs in the `tokamak bench serve` process after the clock has stopped; pure functions of the timelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tools.bench.timeline import Timeline

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the non-empty `values` are, with linear interpolation."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _latency(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return milliseconds, or None if nothing was measured."""
    values = [1000 * value for value in seconds]
    if not values:
        return None
    figures = {f"p{100 * share:.0f}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
    return {"mean": sum(values) / len(values), **figures, "max": max(values)}


def summarize(timelines: Sequence[Timeline], wall_s: float, client_cpu_s: float) -> dict[str, Any]:
    """Return the result of a run. Throughputs are over the whole wall time, latencies over successful requests."""
    done = [timeline for timeline in timelines if not timeline.error]
    failed = [timeline for timeline in timelines if timeline.error]
    num_output_tokens = sum(timeline.num_output_tokens for timeline in done)
    num_prompt_tokens = sum(timeline.usage.prompt_tokens for timeline in done)
    details = {timeline.error: timeline.detail for timeline in reversed(failed)}  # the first of each kind
    return {
        "num_requests": len(timelines),
        "num_succeeded": len(done),
        "num_failed": len(failed),
        "errors": [
            {"kind": kind, "count": count, "first": details[kind]}
            for kind, count in Counter(timeline.error for timeline in failed).most_common()
        ],
        "wall_s": wall_s,
        "client_cpu_share": client_cpu_s / wall_s,
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(timeline.num_cached_tokens for timeline in done),
        "num_output_tokens": num_output_tokens,
        "requests_per_s": len(done) / wall_s,
        "output_tokens_per_s": num_output_tokens / wall_s,
        "total_tokens_per_s": (num_output_tokens + num_prompt_tokens) / wall_s,
        "decode_tokens_per_s": _decode_rate(done),
        "ttft_ms": _latency(timeline.ttft_s for timeline in done),
        "tpot_ms": _latency(tpot_s for timeline in done if (tpot_s := timeline.tpot_s) is not None),
        "itl_ms": _latency(gap for timeline in done for gap in timeline.itl_s),
        "e2e_ms": _latency(timeline.e2e_s for timeline in done),
    }


def _decode_rate(done: Sequence[Timeline]) -> float | None:
    """Return tokens per second while every stream was decoding, or None if they never were (more than one wave)."""
    if not done:
        return None
    begin = max(timeline.deliveries[0] for timeline in done)
    end = min(timeline.deliveries[-1] for timeline in done)
    if end <= begin:
        return None
    num_tokens = sum(
        sum(begin < time <= end for time in timeline.deliveries) * timeline.num_output_tokens / len(timeline.deliveries)
        for timeline in done
    )
    return num_tokens / (end - begin)


def render(result: dict[str, Any]) -> RenderableType:
    """Return a result for the terminal."""
    totals = Table(box=None, show_header=False, pad_edge=False)
    totals.add_column(style="dim")
    totals.add_column(justify="right")
    totals.add_column()
    requests = f"{result['num_succeeded']}/{result['num_requests']}"
    totals.add_row("requests", requests, f"ok in {result['wall_s']:.2f} s, {result['requests_per_s']:.2f} per s")
    totals.add_row("output", f"{result['output_tokens_per_s']:.1f}", f"tokens/s  ({result['num_output_tokens']} tokens)")
    totals.add_row("total", f"{result['total_tokens_per_s']:.1f}", f"tokens/s  ({result['num_prompt_tokens']} prompt tokens)")
    if result["decode_tokens_per_s"] is not None:
        totals.add_row("decode", f"{result['decode_tokens_per_s']:.1f}", "tokens/s while all streams decoded")
    if result["num_cached_tokens"]:
        totals.add_row("cached", str(result["num_cached_tokens"]), "prompt tokens")
    totals.add_row("client", f"{100 * result['client_cpu_share']:.0f}%", "of one processor")
    parts: list[RenderableType] = [totals]
    if result["num_succeeded"]:
        parts += [Text(), _latency_table(result)]
    parts += [Text(f"{error['count']} x {error['kind']}: {error['first']}", style="red") for error in result["errors"]]
    return Group(*parts)


def _latency_table(result: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("ms")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for key, title in LATENCIES.items():
        figures = result[key]
        table.add_row(title, *(f"{figures[column]:.2f}" if figures else "-" for column in COLUMNS))
    return table
