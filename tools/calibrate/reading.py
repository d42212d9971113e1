"""A text going through a model in this process, without an engine. Used by `command.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.messages import SamplingParams, SlotStart, Step
from ops.cpu.rank_group import RankGroup
from ops.modules import KvCache
from shm.segment import MemoryFile
from tools.calibrate.collector import Collector
from workers.assembly import DeviceParts, RunnerParts, build_runner
from workers.devices.device import Device, make_device
from workers.engine.eager_plan import EagerPlan
from workers.engine.inputs import StepInputs
from workers.models import Model
from workers.rank_group.peers import Peers


class _ObservedPlan(EagerPlan):
    """Plan with observed ops, in which the head's input is all rows."""

    def __init__(self, collector: Collector, model: Model, device: Device, inputs: StepInputs, cache: KvCache) -> None:
        super().__init__(model, collector.table(device.ops), inputs, cache)
        self._collector = collector
        self._head = getattr(model, "head", None)

    def _run(self) -> None:
        super()._run()
        if self._head is not None:
            self._collector.add(self._head, self.hidden())


class Reading:
    """A model with observed linears. Sequences have at most `config.max_num_batched_tokens` tokens."""

    def __init__(self, config: EngineConfig, model: ModelConfig, on_progress: Callable[[int, int], None]) -> None:
        self.collector = Collector()
        self._config = config
        self._arena = MemoryFile.create("calibration", config.kv_cache_bytes)
        device = make_device(config.device, config.ops, config.threads, variants=config.cpu_kernels)
        self._states = MemoryFile.create("calibration-states", config.state_bytes) if config.state_bytes else None
        states = self._states.buffer if self._states else None
        parts = RunnerParts(config, model, self._arena.buffer, Peers(config), states=states)
        self._runner = build_runner(parts, DeviceParts(device, StepInputs, self._plan))
        self._runner.load(config.model, 1, on_progress)
        self._num_steps = 0

    def _plan(
        self,
        name: str,
        model: Model,
        device: Device,
        inputs: StepInputs,
        cache: KvCache,
        on_op: Callable[[], None],
        rank_group: RankGroup | None,
        sizes: tuple[int, ...],
        max_sync_free_rows: int,
    ) -> EagerPlan:
        return _ObservedPlan(self.collector, model, device, inputs, cache)

    def read(self, token_ids: Sequence[int]) -> None:
        """Run one sequence from its beginning."""
        self._num_steps += 1
        size, num_tables = self._config.block_size, self._runner.slots.block_tables.shape[1]
        pages = 1 + num_tables * np.arange(-(-len(token_ids) // size), dtype=np.int32)
        tables = [(pages + number).astype(np.int32).tobytes() for number in range(num_tables)]
        start = SlotStart(0, "0", _int32(token_ids), len(token_ids), SamplingParams(temperature=0.0), tables[0])
        start.other_block_ids = tuple(tables[1:])
        start.max_total_tokens = len(token_ids)
        step = Step(
            step_id=self._num_steps,
            starts=[start],
            slots=_int32([0]),
            start=_int32([0]),
            num_tokens=_int32([len(token_ids)]),
            is_sampling=bytes([0]),
            block_slots=b"",
            block_indexes=b"",
            block_ids=b"",
            states=_int32([0, 0, 1, 0, 0] if self._states else []),  # from the beginning to slot 1
        )
        self._runner.run(step)


def _int32(values: Any) -> bytes:
    return np.asarray(values, np.int32).tobytes()
