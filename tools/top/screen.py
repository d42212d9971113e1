"""The screen of `tokamak top`: a snapshot and its figures as lines that fit a terminal of 80 columns and 24 rows, or a larger.

Pure: called by tools/top/command.py. Nothing wraps: what is too long for its column is cut, and rings give way to what matters
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.observation.figures import Distribution, Figures
from engine.observation.snapshot import Actor, Ring, Snapshot
from tools.units import MISSING, count, seconds, share, size, sparkline

LATE_HEARTBEAT_S = 2.0  # a loop that works beats ten times a second
RING_COLUMN_WIDTH = 78
MAX_ERRORS = 6
MAX_GANGS = 4
MAX_ADAPTERS = 5
STATE_STYLES = {
    "RUNNING": "green",
    "READY": "green",
    "PAUSED": "yellow",
    "DRAINING": "yellow",
    "STOPPED": "dim",
    "FAILED": "bold red",
    "DEAD": "bold red",
}


@dataclass(frozen=True, slots=True)
class RunTitle:
    """What a run's manifest says about it."""

    run_id: str
    model: str
    url: str
    started_at: float  # seconds since 1970
    kernels: str = ""  # variants of the native ops
    device: str = ""  # of all ranks


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
    """The screen; without `height` as many lines as there is to tell."""
    num_other_lines = (
        1
        + 1
        + 3
        + bool(title.kernels)
        + bool(figures.device)
        + bool(figures.replica)
        + len(_gangs(figures))
        + len(_experts(figures))
        + len(_media(figures))
        + len(_drafts(figures))
        + len(_adapters(snapshot, now))
        + 6
        + bool(footer)
    )
    shown = snapshot.actors if height is None else _first_actors(snapshot.actors, max(6, height - num_other_lines - 3))
    blocks: list[list[RenderableType]] = [
        [_title(title, snapshot, figures, now, width)],
        [_actors(shown, figures), *_folded(snapshot, shown)],
        [
            *_load(figures, generation_rates, width),
            *_routed(figures),
            *_gangs(figures),
            *_experts(figures),
            *_media(figures),
            *_drafts(figures),
            *_adapters(snapshot, now),
            *_device(title, figures),
            *_kernels(title),
        ],
        [_times(figures)],
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
    lines: list[RenderableType] = []
    for block in blocks:
        lines += [Text(), *block] if is_airy and lines and block else block
    return Group(*lines)


def _table(*columns: str, left: int = 1, gap: int = 2) -> Table:
    """A table without lines; its first `left` columns are aligned to the left, the others to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _title(title: RunTitle, snapshot: Snapshot, figures: Figures, now: float, width: int) -> Text:
    if snapshot.is_alive:
        state = Text(f"  {figures.engine_state}", style="green" if figures.engine_state == "normal" else "yellow")
        state.append(f"  weights v{figures.weight_version}  up {seconds(max(0.0, now - title.started_at))}", style="default")
    else:
        started = datetime.fromtimestamp(title.started_at).strftime("%Y-%m-%d %H:%M:%S")
        state = Text("  DEAD", style="bold red").append(f"  started {started}; its last state:", style="default")
    text = Text(title.run_id, style="bold cyan", no_wrap=True, overflow="ellipsis")
    room = width - len(text) - len(state) - 2
    for part in (title.model, title.url):
        if len(part) + 2 <= room:
            text.append(f"  {part}")
            room -= len(part) + 2
    return text.append_text(state)


def _actors(shown: Sequence[Actor], figures: Figures) -> Table:
    replica = ["rank"] if figures.replica else []
    table = _table("actor", *replica, "state", "epoch", "pid", "heartbeat", "restarts", "cpu", "idle", "rss", "steps", left=2)
    for actor in shown:
        age = actor.heartbeat_age_s
        is_late = actor.is_alive and age is not None and age > LATE_HEARTBEAT_S
        table.add_row(
            actor.name,
            *([figures.replica.get(actor.name, "")] if figures.replica else []),
            _state(actor),
            str(actor.epoch),
            str(actor.pid or MISSING),
            Text(seconds(age), style="bold red" if is_late else ""),
            Text(str(actor.restarts), style="yellow" if actor.restarts else ""),
            share(figures.cpu_share.get(actor.name)),
            share(figures.worker_idle_share[actor.name]) if actor.name in figures.worker_idle_share else "",
            size(actor.resident_bytes),
            count(actor.step),
        )
    return table


def _folded(snapshot: Snapshot, shown: Sequence[Actor]) -> list[Text]:
    """Which actors have no line."""
    num_others = len(snapshot.actors) - len(shown)
    return [Text(f"and {num_others} actors more", style="dim")] if num_others else []


def _first_actors(actors: Sequence[Actor], num_lines: int) -> list[Actor]:
    """As many as have a line, in their order: those that are not all right before all others."""
    if len(actors) <= num_lines:
        return list(actors)
    ranked = sorted(actors, key=lambda actor: actor.is_alive and actor.state in ("RUNNING", "READY"))
    first = ranked[: max(1, num_lines - 1)]
    return [actor for actor in actors if actor in first]


def _state(actor: Actor) -> Text:
    if actor.is_alive or actor.state in ("STOPPED", "FAILED", "DEAD"):
        return Text(actor.state, style=STATE_STYLES.get(actor.state, "cyan"))
    return Text(f"gone ({actor.state})", style="bold red")


def _load(figures: Figures, generation_rates: Sequence[float], width: int) -> list[Text]:
    requests = _line(
        ("requests", ""),
        (f"{figures.num_running}", "running"),
        (f"{figures.num_waiting}", "waiting"),
        (f"{count(figures.requests_per_s)}", "done/s"),
        (f"{figures.num_preemptions}", "preempted"),
        (f"{figures.num_aborted}", "aborted"),
        (f"{figures.num_resubmissions}", "resent"),
    )
    used = figures.num_used_kv_blocks / figures.num_kv_blocks if figures.num_kv_blocks else 0.0
    blocks = _line(("KV blocks", ""))
    blocks.append_text(_bar(used, max(10, width - 66)))
    blocks.append_text(
        _line(
            (f" {figures.num_used_kv_blocks}/{figures.num_kv_blocks}", "used"),
            (f"{figures.num_cached_kv_blocks}", "cached"),
            (share(figures.prefix_hit_share), "prefix hits"),
        )
    )
    tokens = _line(
        ("tokens/s", ""),
        (count(figures.generation_tokens_per_s), "generated"),
        (count(figures.prompt_tokens_per_s), "prompt"),
        (count(figures.computed_tokens_per_s), "computed"),
    )
    tokens.append(sparkline(list(generation_rates), width - len(tokens) - 1), style="cyan")
    return [requests, blocks, tokens]


def _routed(figures: Figures) -> list[Text]:
    """What chose the replicas of the samples, where there are several."""
    parts = [(f"{number}", reason) for reason, number in figures.routed.items() if number]
    return [_line(("routed", ""), *parts)] if figures.replica else []


def _gangs(figures: Figures) -> list[Text]:
    """A line for each gang of ranks, as far as there is room."""
    lines = []
    for gang in figures.gangs[: MAX_GANGS - (len(figures.gangs) > MAX_GANGS)]:
        name = f"gang {gang.ranks[0]}" if len(figures.gangs) > 1 else "gang"
        parts = [
            (f"{gang.num_members} of {len(gang.ranks)}", f"ranks in epoch {gang.epoch}"),
            (share(gang.collective_share), "of steps in collectives"),
        ]
        if gang.num_steps:
            parts += [(count(gang.num_steps), "gang steps"), (share(gang.empty_share), "empty")]
        lines.append(_line((name, ""), *parts))
    num_others = len(figures.gangs) - len(lines)
    return [*lines, Text(f"and {num_others} gangs more", style="dim")] if num_others else lines


def _experts(figures: Figures) -> list[Text]:
    """How evenly ranks are asked for the experts that they share, and which of these most."""
    experts = figures.experts
    if experts is None:
        return []
    hottest = [
        (f"{hot['layer']}/{hot['expert']}", f"{share(hot['share'])} on {'+'.join(map(str, hot['ranks']))}")
        for hot in experts.hottest
    ]
    return [
        _line(
            ("experts", ""),
            (f"{experts.imbalance:.2f}", "max/mean"),
            (f"{experts.worst_imbalance:.2f}", f"in layer {experts.worst_layer}"),
            (f"{experts.num_rebalances}", "rebalances"),
            ("hottest", "(layer/expert)"),
            *hottest,
        )
    ]


def _media(figures: Figures) -> list[Text]:
    """Pictures and video, and what they took so far."""
    media = figures.media
    if media is None:
        return []
    return [
        _line(
            ("media", ""),
            (f"{media.num_units}", "units encoded"),
            (share(media.hit_share), "hits"),
            (seconds(media.fetch_s), "fetch"),
            (seconds(media.prepare_s + media.decode_s), "decode"),
            (seconds(media.encode_s), "encode"),
        )
    ]


def _drafts(figures: Figures) -> list[Text]:
    """How many drafts stand: of each method, and by position."""
    drafts = figures.drafts
    if drafts is None:
        return []
    methods = [(share(standing), f"of {method}") for method, standing in drafts.methods.items()]
    return [
        _line(
            ("drafts", ""),
            (f"{drafts.tokens_per_row:.2f}", "tokens a row"),
            *methods,
            (f"{drafts.num_resting}", "rest"),
            (share(drafts.draft_share), "of the time"),
            (" ".join(f"{100 * standing:.0f}" for standing in drafts.accepted), "% by position"),
        )
    ]


def _adapters(snapshot: Snapshot, now: float) -> list[Text]:
    """A line for each LoRA adapter, as far as there is room: those with the most samples, and of equal ones the newest."""
    ranked = sorted(snapshot.adapters, key=lambda each: (each.num_running + each.num_waiting, each.loaded_at), reverse=True)
    first = ranked[: MAX_ADAPTERS - (len(ranked) > MAX_ADAPTERS)]
    lines: list[Text] = []
    for each in (each for each in snapshot.adapters if each in first):
        parts = [
            (each.name[:32], f"rank {each.rank}"),
            (f"{each.num_running}", "running"),
            (f"{each.num_waiting}", "waiting"),
            (seconds(max(0.0, now - each.loaded_at)), "loaded, leaving" if each.is_leaving else "loaded"),
        ]
        lines.append(_line(("" if lines else "adapters", ""), *parts))
    num_others = len(ranked) - len(first)
    return [*lines, Text(f"and {num_others} adapters more", style="dim")] if num_others else lines


def _device(title: RunTitle, figures: Figures) -> list[Text]:
    """What the ranks' devices can."""
    found = figures.device
    if found is None:
        return []
    graphs = "graphs" if found.has_graphs else "no graphs"
    cache = "cache outlives ranks" if found.keeps_cache else "cache ends with its rank"
    work = [
        f"{found.num_uncaptured} sizes not captured" if found.num_uncaptured else "",
        f"{found.num_fallbacks} ops fallen back" if found.num_fallbacks else "",
        f"{size(found.memory_bytes)} of tensors" if found.memory_bytes else "",
        f"{found.captured_share:.0%} of steps captured" if found.captured_share is not None else "",
        f"{found.copies_per_step:.1f} copies a step" if found.copies_per_step else "",
        f"{found.wait_share:.0%} waited for it" if found.wait_share else "",
    ]
    text = "; ".join([f"{title.device}: {graphs}, {cache}, {' '.join(found.dtypes)}", *filter(None, work)])
    return [_line(("device", "")).append(text)]


def _kernels(title: RunTitle) -> list[Text]:
    """Which variant computes what."""
    return [_line(("kernels", "")).append(title.kernels)] if title.kernels else []


def _line(*parts: tuple[str, str]) -> Text:
    """A line of numbers with their names; a part without a number is the line's title."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for number, name in parts:
        if not name:
            text.append(f"{number:<10}", style="dim")
        else:
            text.append(number, style="bold").append(f" {name}  ", style="dim")
    return text


def _bar(used: float, width: int) -> Text:
    num_filled = min(width, round(used * width))
    style = "red" if used > 0.95 else "yellow" if used > 0.8 else "green"
    return Text("█" * num_filled, style=style).append("░" * (width - num_filled), style="dim")


def _times(figures: Figures) -> Table:
    """The step and its parts beside the latencies that clients see. Six lines."""
    step = _table(f"step {seconds(figures.step_mean_s)}", "mean", "share", "p50", "p99", gap=1)
    for name, part in figures.step.items():
        style = _age_style(part.time)
        step.add_row(name, seconds(part.time.mean), share(part.share), *_quantiles(part.time, "p50", "p99"), style=style)
    latency = _table("latency", "p50", "p90", "p99", "samples", gap=1)
    for name, times in figures.latency.items():
        latency.add_row(name.upper(), *_quantiles(times, "p50", "p90", "p99"), count(times.count), style=_age_style(times))
    idle = f"{count(figures.steps_per_s)} steps/s, ranks idle {share(figures.rank_idle_share)}"
    both = Table.grid(padding=(0, 2, 0, 0))
    both.add_row(step, Group(latency, Text(idle, style="dim", no_wrap=True)))
    return both


def _quantiles(times: Distribution, *names: str) -> list[str]:
    return [seconds(getattr(times, name)) for name in names]


def _age_style(times: Distribution) -> str:
    return "" if times.is_recent else "dim"


def _rings(rings: Sequence[Ring], figures: Figures, width: int, num_lines: int) -> Table:
    """The rings in as many columns as have room, `num_lines` and a heading; the fullest and busiest where not all have room."""
    num_columns = max(1, width // RING_COLUMN_WIDTH)
    rates = figures.ring_records_per_s

    def rank(ring: Ring) -> tuple[float, float]:
        return ring.fill_bytes / ring.capacity_bytes, rates.get(f"{ring.sender}>{ring.receiver}") or 0.0

    first = sorted(rings, key=rank, reverse=True)[: num_columns * num_lines]
    shown = [ring for ring in rings if ring in first]  # in their own order, so that lines stay where they are
    per_column = -(-len(shown) // num_columns) or 1
    grid = Table.grid(padding=(0, 2, 0, 0))
    tables = []
    for begin in range(0, len(shown), per_column):
        table = _table("ring", "fill", "bytes", "records/s", "records", "full waits")
        for ring in shown[begin : begin + per_column]:
            fill = ring.fill_bytes / ring.capacity_bytes
            table.add_row(
                f"{ring.sender} > {ring.receiver}",
                Text(share(fill), style="bold red" if fill > 0.9 else ""),
                size(ring.fill_bytes),
                count(rates.get(f"{ring.sender}>{ring.receiver}")),
                count(ring.num_records),
                Text(count(ring.num_full_waits), style="yellow" if ring.num_full_waits else ""),
            )
        tables.append(table)
    grid.add_row(*tables)
    return grid


def _error_line(snapshot: Snapshot, index: int, width: int) -> Text:
    entry = snapshot.errors[index]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{entry.actor}: ", style="red").append(" ".join(entry.text.split()))
    suffix = f"  x{entry.count}, {seconds(entry.last_age_s)} ago"
    text.truncate(width - len(suffix), overflow="ellipsis")
    return text.append(suffix, style="dim")
