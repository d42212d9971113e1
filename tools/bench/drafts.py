"""Possible speed-up by drafts: tokens per second of a decode step with drafts, relative to one without.

Used by `tokamak bench step --drafts`. If each draft token is accepted with probability a, given that those before it are, a row
of d draft tokens brings 1 + a + a^2 + ... + a^d tokens; the time of a step with such rows is measured. An engine reaches less
because of missing drafts and of the time between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

from tools.bench.replays import Timed
from tools.units import seconds

ACCEPTANCES = (0.5, 0.8, 0.95, 1.0)


def tokens_of_row(num_drafts: int, acceptance: float) -> float:
    """Return the mean number of tokens that a row brings."""
    return sum(acceptance**place for place in range(num_drafts + 1))


def allowed(timed: Timed, plain: Timed, acceptance: float) -> float:
    """Return the tokens per second with these drafts, relative to none."""
    return tokens_of_row(timed.case.num_drafts, acceptance) * plain.step_s / timed.step_s


def _compared(timed: Sequence[Timed]) -> Iterator[tuple[Timed, Timed]]:
    """Yield decode steps, each with that of the same sequences without drafts."""
    decoding = [each for each in timed if each.case.phase == "decode"]
    plain = {(each.case.batch, each.case.context): each for each in decoding if not each.case.num_drafts}
    for each in decoding:
        yield each, plain[each.case.batch, each.case.context - each.case.num_drafts]


def drafts_document(timed: Sequence[Timed], acceptances: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "batch": each.case.batch,
            "context": each.case.context - each.case.num_drafts,
            "num_drafts": each.case.num_drafts,
            "step_s": each.step_s,
            "cost": each.step_s / plain.step_s,
            "allowed": {str(acceptance): allowed(each, plain, acceptance) for acceptance in acceptances},
        }
        for each, plain in _compared(timed)
    ]


def render_drafts(timed: Sequence[Timed], acceptances: Sequence[float]) -> Table:
    """Return a table with the time of each step, and its gain in tokens at each acceptance rate."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="what drafts allow", title_justify="left", title_style="bold")
    for column in ("batch", "context", "drafts", "step", "cost", *(f"at {acceptance:g}" for acceptance in acceptances)):
        table.add_column(column, justify="right", no_wrap=True)
    for each, plain in _compared(timed):
        case = each.case
        gains = [f"{allowed(each, plain, acceptance):.2f}" for acceptance in acceptances]
        cells = str(case.batch), str(case.context - case.num_drafts), str(case.num_drafts), seconds(each.step_s)
        table.add_row(*cells, f"{each.step_s / plain.step_s:.2f}", *gains)
    return table
