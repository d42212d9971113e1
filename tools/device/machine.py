"""Part `machine` of `tools/device/card`: the card, its power, and memory that outlives the process that wrote it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from engine.supervisor.device_arenas import device_arenas
from tools.device.card import Card
from tools.device.findings import Finding, Findings, Outcome
from tools.device.kept_kernels import adopt
from tools.device.part import Item, Plan
from tools.device.rows import directory, emulation

_ARENA_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
_WAIT_S = 30.0


def items(plan: Plan) -> list[Item]:
    return [
        Item("card", lambda: _card(plan)),
        Item("power without an engine", lambda: power("without an engine")),
        Item("arena of a killed process", lambda: _arena(plan)),
        Item("host part of the kernels", lambda: _host_part(plan)),
    ]


def _card(plan: Plan) -> Findings:
    info = Card(plan.driver, 0).driver.info()
    version = f"{info.driver_version // 1000}.{info.driver_version % 1000 // 10}"
    capability = f"{info.capability[0]}.{info.capability[1]}"
    text = f"{info.name}, compute capability {capability}, {info.num_multiprocessors} multiprocessors, CUDA {version}"
    values = {"memory_bytes": float(info.num_bytes), "multiprocessors": float(info.num_multiprocessors)}
    yield Finding.of("card", True, f"{text}, {info.num_bytes >> 20} MiB", **values)
    found = adopt(Path(plan.kernels), directory(is_small=plan.is_small), info)
    yield Finding("kernels that came along", Outcome.HELD if found.num else Outcome.NOT_RUN, found.text)


def power(what: str) -> Findings:
    """Yield the power, clock and temperature that nvidia-smi shows."""
    fields = {"power.draw": "power_w", "clocks.sm": "clock_mhz", "temperature.gpu": "celsius", "driver_version": ""}
    if shutil.which("nvidia-smi") is None:
        yield Finding(f"power {what}", Outcome.NOT_RUN, "there is no nvidia-smi")
        return
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT_S)
    if said.returncode != 0:
        yield Finding(f"power {what}", Outcome.NOT_RUN, f"nvidia-smi: {(said.stdout + said.stderr).strip()}")
        return
    values = {}
    for name, value in zip(fields.values(), said.stdout.strip().split(", "), strict=True):
        if name and value.replace(".", "", 1).isdigit():  # [N/A] on cards that do not tell
            values[name] = float(value)
    text = ", ".join(f"{name} {value}" for name, value in zip(fields, said.stdout.strip().split(", "), strict=True))
    yield Finding.of(f"power {what}", True, text, **values)


def _arena(plan: Plan) -> Findings:
    what, num_bytes, notes = "arena of a killed process", _SMALL_BYTES if plan.is_small else _ARENA_BYTES, list[str]()
    with device_arenas(plan.driver, 1, num_bytes, notes.append) as (arena,):
        if notes:
            yield Finding(what, Outcome.NOT_RUN, notes[0])
            return

        def start(order: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tools.device.arena_process", order, plan.driver, str(arena), str(num_bytes)]
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[arena])

        with start("write") as writer:
            assert writer.stdout is not None
            written = writer.stdout.readline().strip()
            writer.kill()
        readers = [start("read") for _ in range(2)]
        found = [reader.communicate(timeout=_WAIT_S)[0].strip() for reader in readers]
    yield Finding.of(what, bool(written) and found == [written] * 2, f"{num_bytes >> 20} MiB, {written} read as {found}")


def _host_part(plan: Plan) -> Findings:
    """Compile what engines and checks would compile when they start."""
    begin = time.monotonic()
    emulation(is_small=plan.is_small)
    seconds = time.monotonic() - begin
    yield Finding.of("host part of the kernels", True, f"compiled, or found, in {seconds:.1f} s", seconds=seconds)
