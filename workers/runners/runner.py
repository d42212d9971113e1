"""What the worker asks of a runner (implemented by `cpu.py`, `gpu.py` and `xpu.py`), and which runner a device has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.messages import Step, StepResult
from workers.engine.runner import ModelRunner
from workers.extensions.media.features import Features
from workers.rank_group.peers import Peers
from workers.runners.cpu import CpuRunner
from workers.runners.gpu import gpu_runner
from workers.runners.xpu import xpu_runner
from workers.weights.packing import Progress

if TYPE_CHECKING:
    from workers.extensions.adapters.arena import AdapterArena


class Runner(Protocol):
    """Steps of one rank, in order."""

    core: ModelRunner

    @property
    def depth(self) -> int:
        """So many steps may be started before the first of them is finished."""

    def start(self, step: Step) -> None:
        """Enqueue it."""

    def finish(self) -> StepResult:
        """Wait for the first step that was started and is not finished."""

    def load(self, path: str, version: int, on_progress: Progress, contents: str = "") -> None:
        """As `ModelRunner.load`; no step is started."""

    def clear(self) -> None:
        """As `ModelRunner.clear`; no step is started."""


_RUNNERS: dict[str, Callable[..., Runner]] = {"cpu": CpuRunner, "gpu": gpu_runner}


def make_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    arena: memoryview,
    peers: Peers,
    on_op: Callable[[], None] = lambda: None,
    features: Features | None = None,
    adapters: AdapterArena | None = None,
    *,
    device_arena: int = -1,
) -> Runner:
    """That of the configuration's device. XPUs and custom devices have the same. `device_arena`: the descriptor of memory of
    the card that outlives this process; -1: there is none."""
    make = _RUNNERS.get(config.device, xpu_runner)
    if adapters is not None:  # of the CPU alone so far
        make = functools.partial(CpuRunner, adapters=adapters)
    if device_arena >= 0:
        make = functools.partial(gpu_runner, device_arena=device_arena)
    return make(config, model_config, arena, peers, on_op, features)
