"""Options of `make_runner` for CUDA ops on the emulated card."""

from __future__ import annotations

from typing import Any

from tests.devices.driver import emulated_driver
from workers.runners import gpu_runner


def on_card() -> dict[str, Any]:
    return {
        "kind": gpu_runner,
        "ops": "cuda",
        "device": "gpu",
        "plan": "eager",
        "kv_cache_dtype": "float32",
        "device_arena_library": emulated_driver(),
    }
