"""Columns of a step's rows in a vision-language model: features, angles of three positions, a set of experts.

Pure numpy. Used by the step inputs. Angles are computed for the rows of a step, not looked up: positions on the time axis may
far exceed the longest prompt, and computing them is cheap.
"""

from __future__ import annotations

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from workers.engine.inputs import RowsOfSlots, StepInputs
from workers.extensions.media.prompt_media import MediaSlots
from workers.weights.rotary import rotary_angles


class MediaColumns:
    """Columns that read `features`, the rows of the encoder arena, or None if the model serves text only."""

    def __init__(self, config: ModelConfig, features: np.ndarray | None = None) -> None:
        self._features = features
        self._head_dim = config.head_dim
        self._rope = config.rope
        self._axes = np.array(config.rope.pair_axes(), np.int64)
        tokens = config.vision.tokens if config.vision and config.vision_experts else None
        # The experts of a token follow only from its id, or from the unit that it is in, and so do reused keys and values.
        self._around = (tokens.start, tokens.end, tokens.video_start, tokens.video_end) if tokens else ()

    @property
    def _has_axes(self) -> bool:
        return len(self._axes) > 0

    def add_to(self, inputs: StepInputs) -> None:
        inputs.features = inputs.kept.features = self._features
        if self._has_axes:
            inputs.add("row_numbers", inputs.max_rows)
            inputs.set("row_numbers", np.arange(inputs.max_rows))
            inputs.add("row_cosines", inputs.max_rows, self._head_dim, dtype=np.float32)
            inputs.add("row_sines", inputs.max_rows, self._head_dim, dtype=np.float32)

    def bind(self, slots: MediaSlots, token_ids: np.ndarray) -> None:
        """Register the prompts of `slots`, with `token_ids` [slots, tokens]."""
        self._slots, self._token_ids = slots, token_ids

    def set(self, inputs: StepInputs, rows: RowsOfSlots) -> None:
        prompts, slots, starts, counts = self._slots, rows.slots, rows.starts, rows.counts
        ends = np.cumsum(counts)
        is_behind = starts >= prompts.ends[slots]
        positions = rows.positions
        text = positions + (prompts.text_shifts[slots] * is_behind).repeat(counts)
        axes = np.broadcast_to(text, (3, len(text))).astype(np.int32)
        feature_rows = np.full(len(text), -1, np.int32)
        for index in np.flatnonzero(~is_behind & (counts > 0)).tolist():
            part = slice(ends[index] - counts[index], ends[index])
            place = prompts.prompts[slots[index]].place(starts[index], starts[index] + counts[index])
            axes[:, part], feature_rows[part] = place
        expert_sets = (feature_rows >= 0).astype(np.int32)
        if self._around:
            expert_sets |= np.isin(self._token_ids[slots.repeat(counts), positions], self._around)
        for columns, of_rows in ((inputs, slice(None)), (inputs.kept, rows.kept_row_ids)):
            columns.set("feature_rows", feature_rows[of_rows], -1)
            columns.set("expert_sets", expert_sets[of_rows])
        if self._has_axes:
            cosines, sines = rotary_angles(self._rope, self._head_dim, axes[self._axes].T)
            inputs.set("row_cosines", cosines)
            inputs.set("row_sines", sines)
