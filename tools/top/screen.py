"""The screen of `tokamak top`: a snapshot and its figures as lines that fit the terminal. 80 columns show all figures; a
narrower terminal shows fewer columns (fitting.py), and rings are left out first.

Pure: called by tools/top/command.py. work.py has the lines between the actors and the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.observation.figures import Distribution, Figures
from engine.observation.snapshot import Actor, Ring, Snapshot
from tools.top.fitting import Cell, table
from tools.top.work import RunTitle, work_lines
from tools.units import MISSING, count, seconds, share, size

LATE_HEARTBEAT_S = 2.0  # a healthy loop has ten heartbeats per second
RING_COLUMN_WIDTH = 78
MAX_ERRORS = 6
NUM_TIME_LINES = 6
MIN_MODEL_WIDTH = 8
OPTIONAL_OF_ACTORS = ("epoch", "idle", "steps", "restarts", "rank", "pid", "rss", "cpu", "heartbeat")
OPTIONAL_OF_RINGS = ("records", "bytes", "full waits", "records/s", "fill")
STATE_STYLES = {
    "RUNNING": "green",
    "READY": "green",
    "PAUSED": "yellow",
    "DRAINING": "yellow",
    "STOPPED": "dim",
    "FAILED": "bold red",
    "DEAD": "bold red",
}


def render(
    title: RunTitle,
    snapshot: Snapshot,
    figures: Figures,
    generation_rates: Sequence[float] = (),
    *,
    width: int = 80,
    height: int | None = None,
    now: float,
    footer: str = "",
) -> RenderableType:
    """Return the screen; without `height`, all lines."""
    work = work_lines(title, snapshot, figures, generation_rates, width, now)
    num_other_lines = 1 + 1 + len(work) + NUM_TIME_LINES + bool(footer)
    shown = snapshot.actors if height is None else _first_actors(snapshot.actors, max(6, height - num_other_lines - 3))
    blocks: list[list[RenderableType]] = [
        [_title(title, snapshot, figures, now, width)],
        [_actors(shown, figures, width), *_folded(snapshot, shown)],
        [*work],
        [_times(figures, width)],
    ]
    num_rings, num_errors = len(snapshot.rings), min(MAX_ERRORS, len(snapshot.errors))
    is_airy = True
    if height is not None:
        num_actor_lines = len(shown) + (len(shown) < len(snapshot.actors))
        room = height - num_other_lines - num_actor_lines
        is_airy = room >= num_rings + num_errors + 7
        num_errors = min(num_errors, max(1, room // 3))
        num_rings = max(0, room - num_errors - 1)
    if num_rings:
        blocks.append([_rings(snapshot.rings, figures, width, num_rings)])
    blocks.append([_error_line(snapshot, index, width) for index in range(num_errors)])
    if footer:
        blocks.append([Text(footer, style="dim", no_wrap=True, overflow="ellipsis")])
    shown_lines: list[RenderableType] = []
    for block in blocks:
        shown_lines += [Text(), *block] if is_airy and shown_lines and block else block
    return Group(*shown_lines)


def _title(title: RunTitle, snapshot: Snapshot, figures: Figures, now: float, width: int) -> Text:
    if snapshot.is_alive:
        state = Text(f"  {figures.engine_state}", style="green" if figures.engine_state == "normal" else "yellow")
        state.append(f"  weights v{figures.weight_version}  up {seconds(max(0.0, now - title.started_at))}", style="default")
    else:
        started = datetime.fromtimestamp(title.started_at).strftime("%Y-%m-%d %H:%M:%S")
        state = Text("  DEAD", style="bold red").append(f"  started {started}; last state:", style="default")
    text = Text(title.run_id, style="bold cyan", no_wrap=True, overflow="ellipsis")
    room = width - len(text) - len(state) - 2
    model = Text(title.model)
    model.truncate(max(room, MIN_MODEL_WIDTH), overflow="ellipsis")
    text.append("  ").append_text(model)
    if len(model) + len(title.url) + 2 <= room:
        text.append(f"  {title.url}")
    return text.append_text(state)


def _actors(shown: Sequence[Actor], figures: Figures, width: int) -> Table:
    columns = ["actor", "rank", "state", "epoch", "pid", "heartbeat", "restarts", "cpu", "idle", "rss", "steps"]
    rows: list[list[Cell]] = [
        [
            actor.name,
            figures.replica.get(actor.name, ""),
            _state(actor),
            str(actor.epoch),
            str(actor.pid or MISSING),
            _heartbeat(actor),
            Text(str(actor.restarts), style="yellow" if actor.restarts else ""),
            share(figures.cpu_share.get(actor.name)),
            share(figures.worker_idle_share[actor.name]) if actor.name in figures.worker_idle_share else "",
            size(actor.resident_bytes),
            count(actor.step),
        ]
        for actor in shown
    ]
    if not figures.replica:
        columns, rows = columns[:1] + columns[2:], [row[:1] + row[2:] for row in rows]
    return table(width, columns, rows, left=2, optional=OPTIONAL_OF_ACTORS)


def _heartbeat(actor: Actor) -> Text:
    age = actor.heartbeat_age_s
    is_late = actor.is_alive and age is not None and age > LATE_HEARTBEAT_S
    return Text(seconds(age), style="bold red" if is_late else "")


def _folded(snapshot: Snapshot, shown: Sequence[Actor]) -> list[Text]:
    """Return a line for the actors that have none of their own."""
    num_others = len(snapshot.actors) - len(shown)
    return [Text(f"and {num_others} more actors", style="dim")] if num_others else []


def _first_actors(actors: Sequence[Actor], num_lines: int) -> list[Actor]:
    """Return the actors that get a line, in order; those with a fault are preferred."""
    if len(actors) <= num_lines:
        return list(actors)
    ranked = sorted(actors, key=lambda actor: actor.is_alive and actor.state in ("RUNNING", "READY"))
    first = ranked[: max(1, num_lines - 1)]
    return [actor for actor in actors if actor in first]


def _state(actor: Actor) -> Text:
    if actor.is_alive or actor.state in ("STOPPED", "FAILED", "DEAD"):
        return Text(actor.state, style=STATE_STYLES.get(actor.state, "cyan"))
    return Text(f"gone ({actor.state})", style="bold red")


def _times(figures: Figures, width: int) -> Table:
    """Return the times of the step and its parts next to the latencies of clients."""
    half = (width - 2) // 2
    parts = [(name, part) for name, part in figures.step.items()]
    step = table(
        half,
        (f"step {seconds(figures.step_mean_s)}", "mean", "share", "p50", "p99"),
        [(name, seconds(part.time.mean), share(part.share), *_quantiles(part.time, "p50", "p99")) for name, part in parts],
        gap=1,
        optional=("p99", "p50", "share"),
        styles=[_age_style(part.time) for _, part in parts],
    )
    latencies = figures.latency.items()
    latency = table(
        half,
        ("latency", "p50", "p90", "p99", "samples"),
        [(name.upper(), *_quantiles(times, "p50", "p90", "p99"), count(times.count)) for name, times in latencies],
        gap=1,
        optional=("samples", "p90", "p99"),
        styles=[_age_style(times) for _, times in latencies],
    )
    idle = f"{count(figures.steps_per_s)} steps/s, ranks idle {share(figures.rank_idle_share)}"
    both = Table.grid(padding=(0, 2, 0, 0))
    both.add_row(step, Group(latency, Text(idle, style="dim", no_wrap=True, overflow="ellipsis")))
    return both


def _quantiles(times: Distribution, *names: str) -> list[str]:
    return [seconds(getattr(times, name)) for name in names]


def _age_style(times: Distribution) -> str:
    return "" if times.is_recent else "dim"


def _rings(rings: Sequence[Ring], figures: Figures, width: int, num_lines: int) -> Table:
    """Return the rings in as many columns as fit, in `num_lines` lines and a heading; if not all fit, the fullest and
    busiest."""
    num_columns = max(1, width // RING_COLUMN_WIDTH)
    rates = figures.ring_records_per_s

    def rank(ring: Ring) -> tuple[float, float]:
        return ring.fill_bytes / ring.capacity_bytes, rates.get(f"{ring.sender}>{ring.receiver}") or 0.0

    first = sorted(rings, key=rank, reverse=True)[: num_columns * num_lines]
    shown = [ring for ring in rings if ring in first]  # in a fixed order, so that lines do not move
    per_column = -(-len(shown) // num_columns) or 1
    grid = Table.grid(padding=(0, 2, 0, 0))
    tables = []
    for begin in range(0, len(shown), per_column):
        rows = [_ring(ring, rates.get(f"{ring.sender}>{ring.receiver}")) for ring in shown[begin : begin + per_column]]
        columns = ("ring", "fill", "bytes", "records/s", "records", "full waits")
        tables.append(table(width // num_columns - 2, columns, rows, optional=OPTIONAL_OF_RINGS))
    grid.add_row(*tables)
    return grid


def _ring(ring: Ring, records_per_s: float | None) -> Sequence[Cell]:
    fill = ring.fill_bytes / ring.capacity_bytes
    return (
        f"{ring.sender} > {ring.receiver}",
        Text(share(fill), style="bold red" if fill > 0.9 else ""),
        size(ring.fill_bytes),
        count(records_per_s),
        count(ring.num_records),
        Text(count(ring.num_full_waits), style="yellow" if ring.num_full_waits else ""),
    )


def _error_line(snapshot: Snapshot, index: int, width: int) -> Text:
    entry = snapshot.errors[index]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{entry.actor}: ", style="red").append(" ".join(entry.text.split()))
    suffix = f"  x{entry.count}, {seconds(entry.last_age_s)} ago"
    text.truncate(width - len(suffix), overflow="ellipsis")
    return text.append(suffix, style="dim")
