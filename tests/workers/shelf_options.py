"""Options of `make_runner` for a rank on the emulated card with packed weights on disk, and sockets that keep loaded ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.devices.driver import emulated_driver
from workers.assembly import RunnerParts
from workers.runners import Ahead, gpu_runner


def shelf_options(directory: Path, sockets: tuple[int, int] = (-1, -1), **options: Any) -> dict[str, Any]:
    def kind(parts: RunnerParts) -> Ahead:
        return gpu_runner(replace(parts, weight_shelf=sockets))

    make: Callable[[RunnerParts], Ahead] = kind
    return {
        "kind": make,
        "ops": "cuda",
        "device": "gpu",
        "plan": "eager",
        "max_model_len": 32,
        "num_kv_blocks": 64,
        "max_num_seqs": 4,
        "device_arena_library": emulated_driver(),
        "weight_cache_dir": str(directory),
        "weight_cache_limit": 1 << 30,
        **options,
    }
