"""An engine with `--device gpu` on the emulated card."""

from __future__ import annotations

from pathlib import Path

from tests.devices.driver import emulated_driver
from tests.devices.engines import OPTIONS
from tests.e2e.engine_process import EngineProcess
from tests.ops.cuda.card import emulated_library

_BUDGET = ("--max-num-batched-tokens", "24")  # the first step of each worker has as many rows, which are emulated


def engine_on_card(model: Path, *options: str) -> EngineProcess:
    emulated_library()  # compiled once, not by each worker
    where = str(Path(emulated_driver()).parent)
    return EngineProcess(model, "--device", "gpu", *OPTIONS, *_BUDGET, *options, environment={"LD_LIBRARY_PATH": where})
