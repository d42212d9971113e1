"""How each step runs: with its actual rows, or padded to a captured size. Owned by the runner.

The ranks of a rank group must replay and capture alike: if one rank captured alone, for example after a reload that failed on a
peer, it would wait in collectives that the others do not call. So they capture in the first step that they replay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.config import EngineConfig
from workers.devices.capabilities import DeviceError
from workers.devices.device import Device
from workers.engine.captures import Captures, Phase, StepMode, StepShape
from workers.engine.extension import Extension
from workers.engine.model_step import ModelStep
from workers.engine.plan import Plan
from workers.engine.rows import NO_ROWS, StepRows
from workers.rank_group.peers import Peers

_NONE = np.zeros(0, np.int32)


class StepModes:
    """Modes and captures of the steps of `model_step`."""

    def __init__(
        self, config: EngineConfig, device: Device, model_step: ModelStep, peers: Peers, extensions: Sequence[Extension]
    ) -> None:
        self._config, self._device, self._model_step, self._peers = config, device, model_step, peers
        self._extensions = extensions
        self._num_drafts = config.speculative_config.max_drafts
        phase = Phase.PREFILL if config.graph_only_prefill else Phase.DECODE
        self._captures = Captures(config.cudagraph_capture_sizes, self._num_drafts, phase)
        self._is_warm, self._are_warm = False, True  # whether captures exist: on this rank, on all ranks of the group

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._captures.sizes

    def mode(self, rows: StepRows) -> StepMode:
        """Return how `rows` run. Ranks that share experts exchange their shapes if needed."""
        own, others = StepShape.of(rows.counts, rows.num_sampled, can_replay=self._can_replay(rows)), []
        if self._captures.sizes and self._peers.share_experts:
            shapes = self._peers.gather_values(np.array([own.phase, own.num_tokens, own.can_replay, self._is_warm], np.int64))
            others = [StepShape(Phase(phase), count, bool(can_replay)) for phase, count, can_replay, _ in shapes.tolist()]
            self._are_warm = bool(shapes[:, 3].all())
        return self._captures.mode(own, others)

    def load(self, plan: Plan, *, has_run: bool = False) -> None:
        """Capture with the new weights. Ranks of a group load at different times and a replay needs all of them, so they
        capture later. `has_run`: the largest step of this plan is known to fit."""
        self._is_warm = False
        if self._peers.are_none:
            self.warm_up(plan, has_run=has_run)
            self._is_warm = True

    def capture_together(self, plan: Plan, mode: StepMode) -> None:
        """Capture the size of `mode` if a rank of the group has not yet; then all capture again."""
        if not mode.size or self._peers.rank_group is not None:  # tapes need no capture
            return
        if not self._peers.share_experts:  # those that do sent it with their shapes
            self._are_warm = self._peers.ranks.count == 1 or bool(self._peers.gather_values(np.array([self._is_warm])).all())
        if self._are_warm:
            return
        self._is_warm = False  # if a rank dies meanwhile, all begin again
        plan.forget()
        for extension in self._extensions:
            extension.on_forget_captures()
        self.warm_up(plan)
        self._is_warm = True

    def warm_up(self, plan: Plan, *, has_run: bool = False) -> None:
        """Run the largest step, which may not fit beside the cache, and replay each captured size once. All rows are padding,
        so only the dummy block is written."""
        if self._config.is_cache_estimated and self._peers.ranks.count == 1 and not has_run:  # peers may still be loading
            self._rehearse(plan)
        for size in self._captures.sizes:
            mode = StepMode(Phase.NONE, self._num_drafts, size)
            self._model_step.set_rows(NO_ROWS, _NONE, mode)
            self._model_step.run(plan, mode)
            for extension in self._extensions:
                extension.on_capture(plan, mode)
        for extension in self._extensions:
            extension.on_warm_up()

    def _rehearse(self, plan: Plan) -> None:
        """Raise DeviceError if a step with the most rows does not fit."""
        inputs = self._model_step.inputs
        try:
            self._model_step.set_rows(NO_ROWS, _NONE, StepMode(Phase.NONE, 0))
            inputs.pad(inputs.max_rows)
            inputs.set_logit_rows(np.arange(inputs.max_logit_rows))
            plan.replay()
            self._device.fetch("logits", plan.logits()).wait()
        except (RuntimeError, MemoryError, DeviceError) as error:
            raise DeviceError(
                f"{self._device.capabilities.place}: a step of {inputs.max_rows} rows does not fit beside the weights and "
                f"{self._config.num_kv_blocks} KV blocks: {error}; lower --gpu-memory-utilization or "
                "--max-num-batched-tokens, or set --num-kv-blocks"
            ) from error

    def _can_replay(self, rows: StepRows) -> bool:
        """Return whether the rows can be replayed: tapes support key bounds, graphs do not."""
        if self._config.ops == "native" or not self._captures.sizes:
            return True
        slots = self._model_step.slots
        return not ((slots.bounds_ends[rows.slots] > rows.starts) & (rows.counts > 0)).any()
