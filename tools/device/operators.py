"""Part `operators` of `tools/device/card`: each CUDA row is equal to the emulation, has the same bits whatever the number of
rows, and is timed, beside PyTorch where it computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import partial

from ops.cuda.library import Library
from tools.device import row_counts, vendor
from tools.device.card import Card
from tools.device.case import Case
from tools.device.cases import cases
from tools.device.findings import Finding, Findings, Outcome, least
from tools.device.part import Item, Plan
from tools.device.rows import RUNS, Roofline, check, directory, emulation, roofline_of, time
from workers.devices.card_kernels import card_library

_LINEAR_BAR = 0.8  # of cuBLAS's speed, in bfloat16


class Setting:
    """A card with the rows, and its measured rates."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @functools.cached_property
    def card(self) -> Card:
        return Card(self.plan.driver, 0)

    @functools.cached_property
    def rows(self) -> Library:
        return card_library(self.card.driver, directory(is_small=self.plan.is_small))

    @functools.cached_property
    def emulated(self) -> Library:
        return emulation(is_small=self.plan.is_small)

    @functools.cached_property
    def roofline(self) -> Roofline:
        return roofline_of(self.card, self.rows, is_small=self.plan.is_small)


def small_cases(plan: Plan) -> list[Case]:
    """Return the cases that are checked: on the emulated card the first of each row."""
    found = cases(is_large=False)
    return list({case.row: case for case in reversed(found)}.values()) if plan.is_small else found


def name_of(case: Case) -> str:
    return f"{case.row}, {case.text}"


def items(plan: Plan) -> list[Item]:
    setting, checked = Setting(plan), small_cases(plan)
    large = checked[:2] if plan.is_small else cases(is_large=True)
    found = [Item(f"equal: {name_of(case)}", partial(_equal, setting, case)) for case in checked]
    many = checked if plan.is_small else [*checked, *(case for case in large if case.row in ("Linear", "Attention"))]
    for name, sets in row_counts.of_cases(many, plan.is_small):
        found.append(Item(f"invariant: {name}", partial(_invariant, setting, name, sets)))
    found.append(Item("measured rates", lambda: _rates(setting)))
    return found + [Item(f"time: {name_of(case)}", partial(_time, setting, case)) for case in large]


def _equal(setting: Setting, case: Case) -> Findings:
    wrong = check(setting.card, setting.rows, setting.emulated, case)
    yield Finding.of(f"equal: {name_of(case)}", not wrong, wrong)


def _invariant(setting: Setting, name: str, sets: Iterable[row_counts.Counted]) -> Findings:
    wrong = row_counts.differences(setting.card, setting.rows, sets)
    yield Finding.of(f"invariant: {name}", not wrong, wrong)


def _rates(setting: Setting) -> Findings:
    roofline = setting.roofline
    peaks = ", ".join(f"{rate / 1e12:.1f} TFLOP/s {dtype}" for dtype, rate in roofline.operations.items())
    values = {"gb_per_s": roofline.num_bytes / 1e9}
    values |= {f"{dtype}_tflop_per_s": rate / 1e12 for dtype, rate in roofline.operations.items()}
    yield Finding.of("measured rates", True, f"{roofline.num_bytes / 1e9:.0f} GB/s, {peaks}", **values)


def _time(setting: Setting, case: Case) -> Findings:
    what = f"time: {name_of(case)}"
    timed = time(setting.card, setting.rows, case, setting.roofline, 1 if setting.plan.is_small else RUNS)
    share = setting.roofline.share(case, timed.seconds)
    values = {"us": timed.seconds * 1e6, "share_of_roofline": share, "share_of_bandwidth": timed.bandwidth_share}
    text = f"{timed.seconds * 1e6:.1f} us, {share:.2f} of the roofline"
    beside = vendor.seconds_of(case)
    if beside.seconds:
        values["torch_us"] = beside.seconds * 1e6
        text += f"; {beside.text} takes {beside.seconds * 1e6:.1f} us, {beside.seconds / timed.seconds:.2f} of our time"
        if case.row == "Linear" and case.dtype == "bfloat16":
            yield least(f"{what}, beside cuBLAS", beside.seconds / timed.seconds, _LINEAR_BAR)
    elif case.row in vendor.ROWS:
        text += f"; not beside PyTorch: {beside.text}"
    is_held = not case.bandwidth_bar or setting.plan.is_small or timed.bandwidth_share >= case.bandwidth_bar
    yield Finding(what, Outcome.HELD if is_held else Outcome.MISSED, text, values)
