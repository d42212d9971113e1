"""The CPU: native ops and tapes, or reference ops on Paddle's CPU place; inputs that the host makes in memory that is the ops'
too; the native sampler; the KV arena of the supervisor.

A step is done when it is started: nothing is gained by waiting for it elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.messages import Step, StepResult
from workers.assembly import Parts, build_runner
from workers.devices.device import make_device
from workers.engine.inputs import StepInputs
from workers.engine.plan import make_plan
from workers.extensions.media.features import Features
from workers.rank_group.peers import Peers
from workers.weights.packing import Progress

if TYPE_CHECKING:
    from workers.extensions.adapters.arena import AdapterArena


class CpuRunner:
    depth = 1

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        arena: memoryview,
        peers: Peers,
        on_op: Callable[[], None] = lambda: None,
        features: Features | None = None,
        adapters: AdapterArena | None = None,
    ) -> None:
        places = peers.seat.place, peers.seat.count
        device = make_device(
            config.device, config.ops, config.threads, peers.rank, *places, config.cpu_kernels, peers.rank_group, peers.meetings
        )
        parts = Parts(device, StepInputs, make_plan)
        self.core = build_runner(config, model_config, parts, arena, peers, on_op, features, adapters)
        self._results: deque[StepResult] = deque()

    def start(self, step: Step) -> None:
        self._results.append(self.core.run(step))

    def finish(self) -> StepResult:
        return self._results.popleft()

    def load(self, path: str, version: int, on_progress: Progress, contents: str = "") -> None:
        self.core.load(path, version, on_progress, contents)

    def clear(self) -> None:
        self.core.clear()
