"""What a step's rows have besides in a model that takes media: features, angles of three positions, a set of experts.

Pure numpy. Made by the runner for the step inputs, which ask it for each step. Angles are computed for the rows of a step, not
looked up: positions on the time axis may lie far beyond the longest prompt, and a row is a small part of a model's work.
"""

from __future__ import annotations

import msgspec
import numpy as np

from engine.checkpoint.model_config import ModelConfig
from workers.engine.slots import Slots
from workers.weights.rotary import rotary_angles


class RowsOfMedia(msgspec.Struct, frozen=True):
    """Of n rows: int32 [n], the first two, and float32 [n, head_dim], empty where positions are one number."""

    feature_rows: np.ndarray
    expert_sets: np.ndarray
    cosines: np.ndarray
    sines: np.ndarray


class MediaRows:
    """`features` are the rows of the encoder arena, or None: the model serves text alone."""

    def __init__(self, config: ModelConfig, features: np.ndarray | None) -> None:
        self.features = features
        self.head_dim = config.head_dim
        self._rope = config.rope
        self._axes = np.array(config.rope.pair_axes(), np.int64)
        tokens = config.vision.tokens if config.vision and config.vision_experts else None
        # A token's experts follow from its id, or from the unit that it is in, alone: so do keys and values that are reused.
        self._around = (tokens.start, tokens.end, tokens.video_start, tokens.video_end) if tokens else ()

    @property
    def has_axes(self) -> bool:
        return len(self._axes) > 0

    def of(
        self, prompts: Slots, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray
    ) -> RowsOfMedia:
        """Sequence i has the positions [starts[i], starts[i] + counts[i]) of `slots[i]`; `token_ids` are those of all rows."""
        ends = np.cumsum(counts)
        is_behind = starts >= prompts.media_ends[slots]
        text = np.arange(len(token_ids)) + (starts - ends + counts + prompts.text_shifts[slots] * is_behind).repeat(counts)
        axes = np.broadcast_to(text, (3, len(text))).astype(np.int32)
        feature_rows = np.full(len(text), -1, np.int32)
        for index in np.flatnonzero(~is_behind & (counts > 0)).tolist():
            rows = slice(ends[index] - counts[index], ends[index])
            axes[:, rows], feature_rows[rows] = prompts.media[slots[index]].place(starts[index], starts[index] + counts[index])
        expert_sets = (feature_rows >= 0).astype(np.int32)
        if self._around:
            expert_sets |= np.isin(token_ids, self._around)
        cosines = sines = np.zeros((0, self.head_dim), np.float32)
        if self.has_axes:
            cosines, sines = rotary_angles(self._rope, self.head_dim, axes[self._axes].T)
        return RowsOfMedia(feature_rows, expert_sets, cosines, sines)
