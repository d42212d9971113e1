"""The end of a step in a pooling engine: hidden states of a prompt become one vector or a list of scores.

The runner's `Output`, instead of `StepSampling`. Arithmetic on hidden states is float64, token by token in prompt order, so the
bits of an answer do not depend on the batch or on chunk boundaries. Partial results of earlier chunks are kept in the slot; if
the rank dies, the scheduler has the prompt computed from its beginning.

    embed       the last hidden state, the mean of all, or the first; truncated to the requested dimensions, then normalized
    classify    the head's logits for it, or those of two tokens; then the model's activation
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from engine.config import PoolingConfig
from engine.dense_module import DenseModule
from engine.errors import CheckpointError
from engine.messages import Pooling, SlotStart, StepResult
from workers.devices.device import Device
from workers.engine.batch_slots import BatchSlots
from workers.engine.inputs import StepInputs
from workers.engine.rows import StepRows
from workers.engine.step_run import StepRun
from workers.weights.safetensors import SafetensorsFile

_SMALLEST_NORM = 1e-12  # as in torch.nn.functional.normalize


class StepPooling:
    """Pooling on the host."""

    def __init__(
        self, rank: int, device: Device, inputs: StepInputs, slots: BatchSlots, pooling: PoolingConfig, hidden_size: int
    ) -> None:
        self._rank, self._device, self._inputs, self._slots, self._pooling = rank, device, inputs, slots, pooling
        self._dense = [Dense(module) for module in pooling.dense]
        self._answers: dict[int, bytes] = {}  # by row of the last step that began
        width = hidden_size if pooling.needs_all_tokens else 0
        self._asked = slots.register("pooling", None, dtype=object)  # Pooling
        self._pooled = slots.register("pooled", 0, width, dtype=np.float64)  # sums over all tokens so far
        self._num_pooled = slots.register("num_pooled", 0)
        slots.add_part(self)

    def start(self, message: SlotStart) -> None:
        self._asked[message.slot] = message.sampling.pooling

    def prepare(self, run: StepRun) -> tuple[np.ndarray, None]:
        rows = run.rows
        kept_counts = rows.counts if self._pooling.needs_all_tokens else self._is_last(rows).astype(np.int32)
        run.kept_ends = kept_counts.cumsum()
        return kept_counts, None

    def begin(self, run: StepRun) -> None:
        """Take the hidden states that the model has computed, before the next step runs."""
        rows, is_last = run.rows, self._is_last(run.rows)
        self._answers = {}
        if self._pooling.needs_all_tokens:
            hidden = run.plan.hidden()
            for row in np.flatnonzero(rows.counts).tolist():
                end = int(run.kept_ends[row])
                self._take(int(rows.slots[row]), int(rows.starts[row]), hidden[end - int(rows.counts[row]) : end])
        if not is_last.any():
            return
        ending = np.flatnonzero(is_last)
        if self._pooling.task == "classify":
            places = rows.counts[ending] if self._pooling.needs_all_tokens else 1
            found = self._logits(run, run.kept_ends[ending] - places)
        elif self._pooling.needs_all_tokens:
            found = self._pooled[rows.slots[ending]]
            if self._pooling.kind == "mean":
                found = found / rows.ends[ending][:, None]
        else:
            found = run.plan.hidden()[run.kept_ends[ending] - 1].astype(np.float64)
        for row, values in zip(ending.tolist(), found, strict=True):
            asked = self._asked[rows.slots[row]]
            for dense in self._dense:
                values = dense.of(values)
            self._answers[row] = finished(values, asked, self._pooling).astype(np.float32).tobytes()

    def end(self, run: StepRun) -> StepResult:
        counts = np.zeros(len(run.rows.slots), np.int32)
        return StepResult(
            step_id=run.step.step_id,
            rank=self._rank,
            weight_version=0,
            token_ids=b"",
            logprobs=b"",
            ranks=b"",
            counts=counts.tobytes(),
            dispatch_ns=run.step.dispatch_ns,
            pooled=self._answers,
        )

    def _is_last(self, rows: StepRows) -> np.ndarray:
        """Return which rows end their prompt."""
        is_last: np.ndarray = (rows.counts > 0) & (rows.ends == self._slots.num_prompt_tokens[rows.slots])
        return is_last

    def _take(self, slot: int, start: int, hidden: np.ndarray) -> None:
        """Add the hidden states [n, hidden] of the slot's next positions."""
        known = int(self._num_pooled[slot])
        assert start == known, f"position {start} of slot {slot} is pooled after {known} others"
        self._num_pooled[slot] += len(hidden)
        pooled = self._pooled[slot]
        for state in hidden[: 1 if start == 0 else 0] if self._pooling.kind == "cls" else hidden:
            pooled += state

    def _logits(self, run: StepRun, kept_rows: np.ndarray) -> np.ndarray:
        """Return logits of the given kept rows: float64 [n, outputs of the head]."""
        parts = []
        for begin in range(0, len(kept_rows), self._inputs.max_logit_rows):
            part = kept_rows[begin : begin + self._inputs.max_logit_rows]
            self._inputs.set_logit_rows(part)
            parts.append(self._device.fetch("logits", run.plan.logits()).wait()[: len(part)].astype(np.float64))
        return np.concatenate(parts)


class Dense:
    """A linear after pooling, with its weights. Raises CheckpointError."""

    def __init__(self, module: DenseModule) -> None:
        tensors = SafetensorsFile(Path(module.path)).tensors
        expected: dict[str, tuple[int, ...]] = {"linear.weight": (module.num_outputs, module.num_inputs)}
        expected |= {"linear.bias": (module.num_outputs,)} if module.has_bias else {}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != expected:
            raise CheckpointError(f"{module.path} has the tensors {shapes}, expected {expected}")
        self._weight = tensors["linear.weight"].read().astype(np.float64)
        self._bias = tensors["linear.bias"].read().astype(np.float64) if module.has_bias else 0.0
        self._activation = module.activation

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the result for one vector, float64."""
        found: np.ndarray = self._weight @ values + self._bias
        return np.tanh(found) if self._activation == "tanh" else found


def finished(values: np.ndarray, asked: Pooling, pooling: PoolingConfig) -> np.ndarray:
    """Return the answer of one prompt, float64 [n], from the pooled vector or logits `values`, float64."""
    if pooling.task == "embed":
        values = values[: asked.num_dimensions or None]
        is_normalized = pooling.is_normalized if asked.is_finished is None else asked.is_finished
        return values / max(math.sqrt(math.fsum((values * values).tolist())), _SMALLEST_NORM) if is_normalized else values
    if pooling.class_token_ids:
        *no, yes = values[list(pooling.class_token_ids)]
        values = np.array([yes - sum(no)])
    if pooling.activation == "none" or asked.is_finished is False:
        return values
    if pooling.activation == "sigmoid":
        return np.array([sigmoid(value) for value in values.tolist()])
    shares = [math.exp(value) for value in (values - values.max()).tolist()]
    return np.array(shares) / math.fsum(shares)


def sigmoid(value: float) -> float:
    """1 / (1 + e^-value), for any value."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
