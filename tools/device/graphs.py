"""Part `graphs` of `tools/device/card`: each CUDA row captured in a graph and replayed; checks by compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from functools import partial

import numpy as np

from tools.device.case import Case
from tools.device.findings import Finding, Findings, Outcome
from tools.device.operators import Setting, name_of, small_cases
from tools.device.part import Item, Plan
from tools.device.rows import Placed

_REPLAYS, _SMALL_REPLAYS = 100, 3
_SANITIZER_S = 80.0
_PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))


def items(plan: Plan) -> list[Item]:
    setting = Setting(plan)
    found = [Item(f"replayed: {name_of(case)}", partial(_replayed, setting, case)) for case in small_cases(plan)]
    return found + [Item(tool, partial(_sanitized, plan, tool)) for tool in ("memcheck", "racecheck")]


def _replayed(setting: Setting, case: Case) -> Findings:
    """A graph first copies all operands from a second place, since some rows change them, and then runs the row."""
    what, card = f"replayed: {name_of(case)}", setting.card
    num = _SMALL_REPLAYS if setting.plan.is_small else _REPLAYS
    placed = Placed(card, case)
    copies = [(address, card.allocate(size), size) for address, size in placed.memory() if size]
    try:
        for address, copy, size in copies:
            card.copy(copy, address, size)
        setting.rows.run(case.row, placed.operands)  # compiles and loads what it needs
        expected = case.compared(placed.outcome())

        def run(stream: int) -> None:
            for address, copy, size in copies:
                card.driver.call("cuMemcpyDtoDAsync_v2", address, copy, size, stream)
            setting.rows.run(case.row, placed.operands, stream)

        replay, wrong = card.captured(run), 0
        for _ in range(num):
            replay()
            found = case.compared(placed.outcome())
            wrong += not all(np.array_equal(*pair, equal_nan=True) for pair in zip(found, expected, strict=True))
    finally:
        for _, copy, _ in copies:
            card.free(copy)
        placed.free()
    yield Finding.of(what, wrong == 0, f"{wrong} of {num} results differ" if wrong else f"{num} equal results")


def _sanitized(plan: Plan, tool: str) -> Findings:
    sanitizer = shutil.which("compute-sanitizer", path=_PLACES)
    if sanitizer is None or plan.is_small:
        yield Finding(tool, Outcome.NOT_RUN, "there is no compute-sanitizer" if sanitizer is None else "the card is emulated")
        return
    checks = [sys.executable, "-m", "tools.device.rows", "--driver", plan.driver, "--checks"]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *checks]
    left_s = min(_SANITIZER_S, plan.until - time.monotonic() - 2)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(left_s, 1))
    except subprocess.TimeoutExpired as error:
        text = error.stdout if isinstance(error.stdout, str) else (error.stdout or b"").decode(errors="replace")
        is_clean = "ERROR SUMMARY" not in text and "Invalid" not in text and "hazard" not in text
        told = f"{text.count('right: ')} checks without an error in {left_s:.0f} s, the others were not run"
        yield Finding(tool, Outcome.NOT_RUN if is_clean else Outcome.MISSED, told if is_clean else text[-2000:])
        return
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "=========" in line]
    text = lines[-1].strip("= ") if lines else done.stderr[-500:]
    errors = [line.strip("= ") for line in lines if "Error:" in line or "Invalid" in line or "hazard" in line]
    yield Finding.of(tool, done.returncode == 0, "; ".join([text, *errors[:3]]))
