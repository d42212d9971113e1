"""State slots of a step's sequences, as the ops of recurrent layers read them (`ops.table.Inputs.states`).

The scheduler assigns the slots (`engine/scheduler/states.py`). Only the rank knows where a row begins that follows drafts, and
how many tokens the state has that this row reads.
"""

from __future__ import annotations

import numpy as np

from engine.config import EngineConfig
from workers.engine.extension import Extension
from workers.engine.inputs import RowsOfSlots, StepInputs
from workers.engine.step_run import StepRun

READ, POSITION, WRITE, KEEP, KEEP_AT, NUM_CERTAIN = range(6)
_NUM_SENT = 5


class StateSlots(Extension):
    """Fills `states` of the inputs: int32 [sequences, 6], zeros for sequences without rows."""

    def __init__(self, config: EngineConfig) -> None:
        self._num_sequences = config.max_num_seqs + config.max_cudagraph_capture_size
        self._num_overlap = config.speculative_config.num_overlap
        self._num_logged = config.speculative_config.num_logged
        self._num_tokens = np.zeros(config.num_states + 1, np.int32)  # in the state that this process wrote to each slot
        self._run: StepRun | None = None

    def add_to(self, inputs: StepInputs) -> None:
        inputs.add("states", self._num_sequences, _NUM_SENT + 1)

    def before_inputs(self, run: StepRun) -> None:
        self._run = run

    def set(self, inputs: StepInputs, rows: RowsOfSlots) -> None:
        states = np.zeros((len(rows.slots), _NUM_SENT + 1), np.int32)
        if len(states):
            assert self._run is not None
            self._fill(states, self._run, rows)
        inputs.set("states", states)

    def _fill(self, states: np.ndarray, run: StepRun, rows: RowsOfSlots) -> None:
        step, is_computed = run.step, rows.counts > 0
        states[:, :_NUM_SENT] = np.frombuffer(step.states, np.int32).reshape(-1, _NUM_SENT)
        known = self._num_tokens[states[:, READ]]  # 0: written by an earlier process, so the results before are known
        if step.is_following:
            is_following = np.frombuffer(step.is_following, np.bool_)
            states[is_following, POSITION] = np.maximum(states[is_following, POSITION], known[is_following])
        states[:, NUM_CERTAIN] = np.maximum(rows.counts - run.rows.num_drafts - self._num_overlap, 0)
        states[~is_computed] = 0
        position, ends = states[:, POSITION], rows.starts + states[:, NUM_CERTAIN]
        replayed = (rows.starts - position)[is_computed]
        assert ((replayed >= 0) & (replayed <= self._num_logged)).all(), f"{replayed} rows between states and their rows"
        assert ((position == known) | (known == 0) | ~is_computed).all(), f"states of {known} tokens are read as of {position}"
        self._num_tokens[states[is_computed, WRITE]] = ends[is_computed]
        is_kept = is_computed & (states[:, KEEP] > 0) & (position < states[:, KEEP_AT]) & (states[:, KEEP_AT] <= ends)
        self._num_tokens[states[is_kept, KEEP]] = states[is_kept, KEEP_AT]
