"""Runners: the steps of one rank, in order, on each kind of device. `make_runner` chooses by the configuration.

    cpu         native ops and tapes, or reference ops on Paddle's CPU place; the host makes the inputs in memory that the ops
                read, and samples. A step is complete when `start` returns: waiting elsewhere gains nothing.
    gpu         NVIDIA GPUs: CUDA ops on the driver, without Paddle, or Paddle's reference or fused ops. Graphs on request.
                The device makes the inputs from one copy, and samples if it can; otherwise the native sampler does, from
                logits fetched into pinned memory. The cache may be memory of the card that the supervisor holds: a
                restarted worker finds it.
    xpu, other  Kunlun XPUs and custom devices with Paddle, which have the same interface. `Capabilities` shows at the start
                if a device lacks asynchronous copies or graphs.

Not tested on GPUs or XPUs yet. Their steps run one ahead (`Ahead`).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from engine.messages import Step, StepResult
from workers.assembly import DeviceParts, RunnerParts, build_runner
from workers.devices.device import make_device
from workers.devices.persistent_kv_arena import PersistentKvArena
from workers.engine.device_inputs import DeviceInputs
from workers.engine.inputs import StepInputs
from workers.engine.plan import make_plan
from workers.engine.runner import ModelRunner
from workers.engine.step_run import StepRun


class Runner(Protocol):
    """Steps of one rank, in order. Weights are loaded into `core`, while no step is running."""

    core: ModelRunner

    @property
    def depth(self) -> int:
        """Number of steps that may be started before the first of them is finished."""

    def start(self, step: Step) -> None:
        """Enqueue a step."""

    def finish(self) -> StepResult:
        """Wait for the oldest unfinished step."""


class InStep:
    """Runner on which steps are complete when they are started."""

    depth = 1

    def __init__(self, core: ModelRunner) -> None:
        self.core = core
        self._results: deque[StepResult] = deque()

    def start(self, step: Step) -> None:
        self._results.append(self.core.run(step))

    def finish(self) -> StepResult:
        return self._results.popleft()


class Ahead:
    """Runner with steps one ahead, on a device that works asynchronously.

                 tokens that the device samples               tokens that the host samples
    start n      enqueue n                                    enqueue n
    start n + 1  enqueue n + 1, which reads the tokens of n   wait for n and sample its tokens; enqueue n + 1
    finish       wait for n                                   the result of n, at once
                 The result of n is sent while the device works on n + 1.
    """

    def __init__(self, core: ModelRunner) -> None:
        self.core = core
        self._begun: deque[StepRun] = deque()
        self._results: deque[StepResult] = deque()

    @property
    def depth(self) -> int:
        return 2 if self.core.can_run_ahead else 1

    def start(self, step: Step) -> None:
        assert len(self._begun) + len(self._results) < self.depth, "too many steps in flight"
        if self._begun and not self._begun[-1].is_sampled_on_device:
            self._end()
        self._begun.append(self.core.begin(step))

    def finish(self) -> StepResult:
        if not self._results:
            self._end()
        return self._results.popleft()

    def _end(self) -> None:
        """End the oldest step."""
        self._results.append(self.core.end(self._begun.popleft()))


def make_runner(parts: RunnerParts) -> Runner:
    """Return the runner of the configuration's device. Adapters need native or CUDA ops."""
    kind = "cpu" if parts.adapters is not None and parts.config.ops != "cuda" else parts.config.device
    if parts.device_arena >= 0 or kind == "gpu":
        return gpu_runner(parts)
    return cpu_runner(parts) if kind == "cpu" else xpu_runner(parts)


def cpu_runner(parts: RunnerParts) -> InStep:
    config, peers = parts.config, parts.peers
    device = make_device(
        config.device,
        config.ops,
        config.threads,
        peers.rank,
        peers.seat.place,
        peers.seat.count,
        config.cpu_kernels,
        peers.rank_group,
        peers.meetings,
    )
    return InStep(build_runner(parts, DeviceParts(device, StepInputs, make_plan)))


def gpu_runner(parts: RunnerParts) -> Ahead:
    config, peers = parts.config, parts.peers
    lasting = None
    if parts.device_arena >= 0:
        lasting = PersistentKvArena(config.device_arena_library, peers.rank, parts.device_arena, parts.arena)
    if config.ops == "cuda":
        from workers.devices.cuda.device import cuda_device  # only on cards

        card = cuda_device(config.device_arena_library, config.dtype, lasting, peers, parts.model, parts.weight_shelf)
        if parts.features is not None:
            card.lend(parts.features.arena.rows)
        if parts.adapters is not None:
            parts.adapters.keep_on(card)
        return Ahead(build_runner(parts, DeviceParts(card, DeviceInputs, make_plan)))
    device = make_device(config.device, config.ops, config.threads, peers.rank, meetings=peers.meetings, lasting=lasting)
    return Ahead(build_runner(parts, DeviceParts(device, DeviceInputs, make_plan)))


def xpu_runner(parts: RunnerParts) -> Ahead:
    config, peers = parts.config, parts.peers
    device = make_device(config.device, config.ops, config.threads, peers.rank, meetings=peers.meetings)
    return Ahead(build_runner(parts, DeviceParts(device, DeviceInputs, make_plan)))
