"""Work of the engine as lines of figures: requests, blocks, tokens, and its optional parts (rank groups, experts, media,
drafts, adapters, devices).

Pure: called by screen.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from engine.observation.figures import Figures
from engine.observation.snapshot import Snapshot
from tools.top.fitting import figure, lines
from tools.units import count, seconds, share, size, sparkline

MAX_RANK_GROUPS = 4
MAX_ADAPTERS = 5
MAX_ENGINES = 8


@dataclass(frozen=True, slots=True)
class RunTitle:
    """Facts from a run's manifest."""

    run_id: str
    model: str
    url: str
    started_at: float  # seconds since 1970
    kernels: str = ""  # variants of the native ops
    device: str = ""  # of all ranks


def work_lines(
    title: RunTitle, snapshot: Snapshot, figures: Figures, generation_rates: Sequence[float], width: int, now: float
) -> list[Text]:
    """Return all lines. `now`: seconds since 1970."""
    return [
        *_load(figures, generation_rates, width),
        *_engines(snapshot, width),
        *_routed(figures, width),
        *_rank_groups(figures, width),
        *_experts(figures, width),
        *_media(figures, width),
        *_drafts(figures, width),
        *_adapters(snapshot, now, width),
        *_device(title, figures, width),
        *_kernels(title, width),
    ]


def _load(figures: Figures, generation_rates: Sequence[float], width: int) -> list[Text]:
    requests = [
        figure(f"{figures.num_running}", "running"),
        figure(f"{figures.num_waiting}", "waiting"),
        figure(f"{count(figures.requests_per_s)}", "done/s"),
        figure(f"{figures.num_preemptions}", "preempted"),
        figure(f"{figures.num_aborted}", "aborted"),
        figure(f"{figures.num_resubmissions}", "resent"),
    ]
    used = figures.num_used_kv_blocks / figures.num_kv_blocks if figures.num_kv_blocks else 0.0
    blocks = [
        _bar(used, max(10, width - 66)),
        figure(f"{figures.num_used_kv_blocks}/{figures.num_kv_blocks}", "used"),
        figure(f"{figures.num_cached_kv_blocks}", "cached"),
        figure(share(figures.prefix_hit_share), "prefix hits"),
    ]
    tokens = [
        figure(count(figures.generation_tokens_per_s), "generated"),
        figure(count(figures.prompt_tokens_per_s), "prompt"),
        figure(count(figures.computed_tokens_per_s), "computed"),
    ]
    rates = lines(width, "tokens/s", tokens)
    bars = sparkline(list(generation_rates), width - rates[-1].cell_len - 3)
    rates[-1].append(f"  {bars}" if bars else "", style="cyan")
    return [*lines(width, "requests", requests), *lines(width, "KV blocks", blocks), *rates]


def _engines(snapshot: Snapshot, width: int) -> list[Text]:
    """Return a line for each engine of a router, as far as there is room: those that are not ready first, then the busiest."""
    ranked = sorted(snapshot.engines, key=lambda each: (each.state == "ready", -each.num_running - each.num_waiting))
    first = ranked[: MAX_ENGINES - (len(ranked) > MAX_ENGINES)]
    found: list[Text] = []
    for each in (each for each in snapshot.engines if each in first):
        parts = [
            figure(each.address, each.state),
            figure(f"{each.num_running}", "running"),
            figure(f"{each.num_waiting}", "waiting"),
            figure(share(each.hit_share), "prefix hits"),
            figure(f"{each.num_routed}", "routed"),
            figure(f"{each.num_resubmitted}", "resent"),
        ]
        found += lines(width, "" if found else "engines", parts)
    num_others = len(ranked) - len(first)
    return [*found, Text(f"and {num_others} more engines", style="dim")] if num_others else found


def _routed(figures: Figures, width: int) -> list[Text]:
    """Return the number of sequences routed for each reason, if there are several replicas."""
    parts = [figure(f"{number}", reason) for reason, number in figures.routed.items() if number]
    return lines(width, "routed", parts or [Text()]) if parts or figures.replica else []


def _rank_groups(figures: Figures, width: int) -> list[Text]:
    """Return a line for each rank group, as far as there is room."""
    shown = figures.rank_groups[: MAX_RANK_GROUPS - (len(figures.rank_groups) > MAX_RANK_GROUPS)]
    found = []
    for rank_group in shown:
        name = f"group {rank_group.ranks[0]}" if len(figures.rank_groups) > 1 else "group"
        parts = [
            figure(f"{rank_group.num_members} of {len(rank_group.ranks)}", f"ranks in epoch {rank_group.epoch}"),
            figure(share(rank_group.collective_share), "of steps in collectives"),
        ]
        if rank_group.num_steps:
            parts += [figure(count(rank_group.num_steps), "group steps"), figure(share(rank_group.empty_share), "empty")]
        found += lines(width, name, parts)
    num_others = len(figures.rank_groups) - len(shown)
    return [*found, Text(f"and {num_others} more rank groups", style="dim")] if num_others else found


def _experts(figures: Figures, width: int) -> list[Text]:
    """Return the load balance of ranks that share experts, and the hottest experts."""
    experts = figures.experts
    if experts is None:
        return []
    parts = [
        figure(f"{experts.imbalance:.2f}", "max/mean"),
        figure(f"{experts.worst_imbalance:.2f}", f"in layer {experts.worst_layer}"),
        figure(f"{experts.num_rebalances}", "rebalances"),
        figure("hottest", "(layer/expert)"),
    ]
    for hot in experts.hottest:
        ranks = "+".join(map(str, hot["ranks"]))
        parts.append(figure(f"{hot['layer']}/{hot['expert']}", f"{share(hot['share'])} on {ranks}"))
    return lines(width, "experts", parts)


def _media(figures: Figures, width: int) -> list[Text]:
    """Return the numbers and costs of pictures and videos so far."""
    media = figures.media
    if media is None:
        return []
    parts = [
        figure(f"{media.num_units}", "units encoded"),
        figure(share(media.hit_share), "hits"),
        figure(seconds(media.fetch_s), "fetch"),
        figure(seconds(media.prepare_s + media.decode_s), "decode"),
        figure(seconds(media.encode_s), "encode"),
    ]
    return lines(width, "media", parts)


def _drafts(figures: Figures, width: int) -> list[Text]:
    """Return the share of accepted draft tokens, by method and by position."""
    drafts = figures.drafts
    if drafts is None:
        return []
    parts = [
        figure(f"{drafts.tokens_per_row:.2f}", "tokens a row"),
        *(figure(share(accepted), f"of {method}") for method, accepted in drafts.methods.items()),
        figure(f"{drafts.num_resting}", "rest"),
        figure(share(drafts.draft_share), "of the time"),
        figure(" ".join(f"{100 * accepted:.0f}" for accepted in drafts.accepted), "% by position"),
    ]
    return lines(width, "drafts", parts)


def _adapters(snapshot: Snapshot, now: float, width: int) -> list[Text]:
    """Return a line for each LoRA adapter, as far as there is room: those with the most sequences first, then the newest."""
    ranked = sorted(snapshot.adapters, key=lambda each: (each.num_running + each.num_waiting, each.loaded_at), reverse=True)
    first = ranked[: MAX_ADAPTERS - (len(ranked) > MAX_ADAPTERS)]
    found: list[Text] = []
    for each in (each for each in snapshot.adapters if each in first):
        parts = [
            figure(each.name[:32], f"rank {each.rank}"),
            figure(f"{each.num_running}", "running"),
            figure(f"{each.num_waiting}", "waiting"),
            figure(seconds(max(0.0, now - each.loaded_at)), "loaded, leaving" if each.is_leaving else "loaded"),
        ]
        found += lines(width, "" if found else "adapters", parts)
    num_others = len(ranked) - len(first)
    return [*found, Text(f"and {num_others} more adapters", style="dim")] if num_others else found


def _device(title: RunTitle, figures: Figures, width: int) -> list[Text]:
    """Return the capabilities of the ranks' devices."""
    found = figures.device
    if found is None:
        return []
    graphs = "graphs" if found.has_graphs else "no graphs"
    cache = "cache survives a restart of its rank" if found.keeps_cache else "cache is lost when its rank ends"
    parts = [
        f"{title.device}: {graphs}, {cache}, {' '.join(found.dtypes)}",
        f"{found.num_uncaptured} sizes not captured" if found.num_uncaptured else "",
        f"{found.num_fallbacks} ops with fallback" if found.num_fallbacks else "",
        f"{size(found.memory_bytes)} of tensors" if found.memory_bytes else "",
        f"{found.captured_share:.0%} of steps captured" if found.captured_share is not None else "",
        f"{found.copies_per_step:.1f} copies per step" if found.copies_per_step else "",
        f"{found.wait_share:.0%} of time spent waiting" if found.wait_share else "",
    ]
    return lines(width, "device", map(Text, filter(None, parts)), "; ")


def _kernels(title: RunTitle, width: int) -> list[Text]:
    """Return the kernel variant of each part."""
    return lines(width, "kernels", map(Text, filter(None, title.kernels.split("; "))), "; ")


def _bar(used: float, width: int) -> Text:
    num_filled = min(width, round(used * width))
    style = "red" if used > 0.95 else "yellow" if used > 0.8 else "green"
    return Text("█" * num_filled, style=style).append("░" * (width - num_filled), style="dim")
