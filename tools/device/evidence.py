"""`tools/device/card`: all that a card can show, in nine minutes, as `card.json` and `card.md`.

    machine    the card, its driver, memory and power; an arena that outlives the process that wrote it
    operators  each CUDA row: equal to the emulation, invariant to the number of rows, timed beside cuBLAS and SDPA of PyTorch
    graphs     each row captured and replayed; memcheck and racecheck of compute-sanitizer
    served     engines over HTTP: the same bytes in all conditions, golden models, kills, a reload, sleep
    speed      decoding and prefill of random weights as a share of the roofline; host time per step; power of an idle engine

Each part runs in processes of its own (`part.py`), with a share of the time. Checks that do not fit are reported as not run.
`tests/tools/test_device_card.py` runs it with `--small` on the emulated card.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from engine.installation import CUDA_DRIVER
from tests.devices.driver import emulated_driver
from tools.device.findings import Finding, Findings, Outcome, summary
from tools.device.part import PARTS, Plan, Said

REPOSITORY = Path(__file__).resolve().parents[2]
_ENDS = {"machine": 0.2, "operators": 0.31, "graphs": 0.38, "served": 0.74, "speed": 1.0}  # shares of the time
_ITEM_S = {"machine": 100, "operators": 40, "graphs": 90, "served": 90, "speed": 90}  # without a finding: an item hangs
_EMULATED = 5  # as much for small sizes, which the emulation computes beside other work
_KILLED_S = 10.0  # that a killed process may take to end: the driver may keep it longer
_TO_WRITE_S = 15.0


class Child:
    """Process that runs the items of a part from number `first` on. Its messages go to `log`."""

    def __init__(self, part: str, first: int, plan: Plan, environment: dict[str, str], log: IO[bytes]) -> None:
        command = [sys.executable, "-m", "tools.device.part", part, str(first), msgspec.json.encode(plan).decode()]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")

    def next(self, until: float) -> Said | None:
        """Return the next message, or None at the end. Raises queue.Empty if there is none `until` then."""
        line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        return msgspec.json.decode(line, type=Said) if line else None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # engines end with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILLED_S)


def run_part(part: str, plan: Plan, environment: dict[str, str], log: IO[bytes]) -> Findings:
    """Yield the findings of a part, in as many processes as it takes: each begins with the item after the one that failed."""
    items, at = [part], 0  # the item that is next, or was begun
    limit_s = _ITEM_S[part] * (_EMULATED if plan.is_small else 1)
    while True:
        with Child(part, at, plan, environment, log) as child:
            is_begun, is_told, is_end = False, False, False
            item_until = time.monotonic() + limit_s
            try:
                while (said := child.next(min(plan.until, item_until))) is not None:
                    items, is_end = said.items or items, said.is_end
                    if said.begun is not None:
                        at, is_begun, is_told, item_until = said.begun, True, False, time.monotonic() + limit_s
                    if said.done is not None:
                        at = said.done + 1
                    if said.finding is not None:
                        item_until = time.monotonic() + limit_s
                        is_told |= said.finding.outcome is Outcome.MISSED
                        yield said.finding
                cause = f"its process ended with {child.process.wait()}, see card.log"
            except queue.Empty:
                cause = f"no result within {limit_s} s"
        if is_end:
            return
        if time.monotonic() >= plan.until:
            yield from _left_out(items[at:], "the time was up")
            return
        if not is_told and at < len(items):
            yield Finding(items[at], Outcome.MISSED, cause)
        at += 1
        if not is_begun or at >= len(items):
            return


def _left_out(items: list[str], cause: str) -> Iterator[Finding]:
    return (Finding(item, Outcome.NOT_RUN, cause) for item in items)


class Evidence:
    """Findings by part, written to `directory` after each finding."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.findings: dict[str, list[Finding]] = {}
        self._begun, self._when = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    @property
    def all(self) -> list[Finding]:
        return [finding for found in self.findings.values() for finding in found]

    def write(self) -> None:
        """Replace both files; whoever kills this process finds whole ones."""
        seconds = round(time.monotonic() - self._begun, 1)
        document: dict[str, Any] = {"when": self._when, "seconds": seconds, "parts": self.findings}
        self._replace("card.json", msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        lines, _ = summary(self.all)
        text = [f"{self._when}, {seconds:.0f} s: {lines[0]}", "", "| part | check | outcome | result |", "|---|---|---|---|"]
        for part, found in self.findings.items():
            for each in found:
                cells = part, each.what, each.outcome.value, each.text
                text.append(f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |")
        self._replace("card.md", "\n".join(text))

    def _replace(self, name: str, text: str) -> None:
        partial = self.directory / f"{name}.part"
        partial.write_text(f"{text}\n")
        partial.replace(self.directory / name)


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 if a check missed or nothing was run."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # kills the part's processes on the way
    environment = dict(os.environ)
    if options.small:  # engines find the stand-in for the driver by its name
        environment["LD_LIBRARY_PATH"] = str(Path(options.driver).parent)
    options.out.mkdir(parents=True, exist_ok=True)
    evidence = Evidence(options.out)
    begun, whole_s = time.monotonic(), max(0.0, 60 * options.minutes - _TO_WRITE_S)
    with (options.out / "card.log").open("wb") as log:
        for part in PARTS:
            found = evidence.findings.setdefault(part, [])
            plan = Plan(os.getpid(), options.driver, options.small, begun + whole_s * _ENDS[part], str(options.kernels))
            findings = run_part(part, plan, environment, log)
            if part not in options.only:
                findings = iter([Finding(part, Outcome.NOT_RUN, "it was not asked for (--only)")])
            for finding in findings:
                found.append(finding)
                evidence.write()
                print(finding.line, flush=True)
    lines, code = summary(evidence.all)
    print("\n" + "\n".join(lines))
    return code


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/device/card", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only", type=lambda given: given.split(","), default=list(PARTS), metavar="NAMES", help=", ".join(PARTS)
    )
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help="when it ends (default: %(default)g)")
    parser.add_argument("--driver", help=f"library of the driver (default: {CUDA_DRIVER}, with --small an emulated one)")
    parser.add_argument("--small", action="store_true", help="few numbers and small models, on the emulated card")
    parser.add_argument("--kernels", type=Path, default=REPOSITORY / "kernels", help="compiled kernels (default: %(default)s)")
    out = Path(os.environ.get("OUT") or os.environ.get("PWD") or ".")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="for results (default: $OUT, or this directory)")
    given = parser.parse_args(arguments)
    if unknown := sorted({*given.only} - {*PARTS}):
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(PARTS)}")
    given.driver = given.driver or (emulated_driver() if given.small else CUDA_DRIVER)
    return given


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
