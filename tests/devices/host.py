"""Cost of a step for the host beside a device that works: `python -m tests.devices.host`, on the device here with the plugin
that it builds.

    host    processor time of the runner in a steady step of 32 rows, captured beside op by op     bar: 0.2
    idle    share of the time in which the device has nothing to do, with kernels of 2 ms          bar: 0.05
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.devices.board import Board
from tests.devices.build import built_plugin
from tests.devices.child import Child
from tools.device.findings import Finding, summary

HOST_BAR, IDLE_BAR = 0.2, 0.05
_NUM_ROWS, _NUM_STEPS, _NUM_SLOW_STEPS = 32, 30, 3
_KERNEL_NS = 2_000_000
_ROUNDS = 3  # by turns; the median


def measured(child: Child) -> Iterator[Finding]:
    shares = []
    for _ in range(_ROUNDS):
        eager, captured = (child.call("host_ns", _NUM_ROWS, plan, _NUM_STEPS) / 1e3 for plan in ("eager", "captured"))
        shares.append((captured / eager, f"{captured:.0f} of {eager:.0f} us"))
    share, text = sorted(shares)[_ROUNDS // 2]
    yield _most(f"host: a captured step of {_NUM_ROWS} rows beside one op by op", share, HOST_BAR, text)
    for plan in ("eager", "captured"):
        found = child.call("steps_ahead", child.board, 4, plan, _NUM_SLOW_STEPS, _KERNEL_NS)
        idle = 1 - found["busy_ns"] / found["span_ns"]
        text = f"{found['kernels']} kernels in {found['span_ns'] / 1e9:.2f} s"
        yield _most(f"idle: {plan} steps with kernels of 2 ms", idle, IDLE_BAR, text)


def _most(what: str, found: float, bar: float, text: str) -> Finding:
    return Finding.of(what, found <= bar, f"{found:.3g} (bar: at most {bar:g}), {text}")


def main() -> int:
    """Return the exit code: 1 if a limit was exceeded."""
    findings = []
    with tempfile.TemporaryDirectory() as directory, Child(built_plugin(), Board(Path(directory) / "board")) as child:
        for finding in measured(child):
            print(finding.line, flush=True)
            findings.append(finding)
    lines, code = summary(findings)
    print("\n" + "\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
