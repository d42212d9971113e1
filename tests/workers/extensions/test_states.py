"""State slots in a step's inputs: what the scheduler says of its rows, and what only the rank knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.state_spec import StateSpec
from engine.config import EngineConfig, SpeculativeConfig
from engine.messages import Step
from tests.configurations import engine_config
from tests.engine.checkpoint.test_state_spec import DELTA, hybrid
from tests.workers.serving import int32
from workers.devices.device import make_device
from workers.engine.inputs import InputSizes, RowsOfSlots, StepInputs
from workers.engine.kv_cache import map_kv_cache
from workers.engine.plan import Plan
from workers.engine.rows import StepRows
from workers.engine.state_cache import map_states
from workers.engine.step_run import StepRun
from workers.extensions.states import StateSlots

DEVICE = make_device("cpu", "native", 1)
Row = tuple[int, int, int, tuple[int, int, int, int, int]]  # start, positions, drafts among them, the scheduler's numbers


def config_of(method: str) -> EngineConfig:
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=3 if method else 1)
    sizes = {"max_model_len": 512, "num_kv_blocks": 9, "max_num_seqs": 4, "num_states": 20}
    return engine_config(model="m", run_id="r", run_dir="r", speculative_config=drafts, **sizes)


class States:
    """The extension and its inputs, for four sequences."""

    def __init__(self, method: str = "ngram") -> None:
        self.slots = StateSlots(config_of(method))
        self.inputs = StepInputs(DEVICE, InputSizes(4, 64, 512, 16), [self.slots])

    def set(self, rows: Sequence[Row], following: bytes = b"") -> list[list[int]]:
        """Return the sequences' rows of the tensor in a step."""
        starts, counts, drafts = (np.array([row[part] for row in rows], np.int32) for part in (0, 1, 2))
        slots = np.arange(len(rows), dtype=np.int32)
        states = int32(number for row in rows for number in row[3])
        step = Step(1, [], int32(slots), b"", b"", b"", b"", b"", b"", is_following=following, states=states)
        self.slots.before_inputs(StepRun(step, StepRows(slots, starts, counts, 1 + drafts, drafts), cast(Plan, None)))
        self.slots.set(self.inputs, RowsOfSlots(slots, starts, counts, np.zeros(0, np.int64)))
        found = np.array(self.inputs.states)
        assert found.shape == (4, 6)
        assert not found[len(rows) :].any(), "nothing of an earlier step"
        return [row.tolist() for row in found[: len(rows)]]


def test_rows_before_drafts_are_certain() -> None:
    states = States()
    rows = [(0, 9, 0, (0, 0, 5, 7, 8)), (40, 4, 3, (2, 40, 3, 0, 0)), (12, 1, 0, (9, 10, 4, 0, 0))]
    assert states.set(rows) == [[0, 0, 5, 7, 8, 9], [2, 40, 3, 0, 0, 1], [9, 10, 4, 0, 0, 1]]
    assert states.set([]) == []


def test_sequences_without_rows_read_and_write_nothing() -> None:
    """They had no token in their last step, or have ended."""
    assert States().set([(7, 0, 0, (1, 5, 2, 3, 6)), (7, 1, 0, (4, 7, 5, 0, 0))]) == [[0] * 6, [4, 7, 5, 0, 0, 1]]


def test_row_that_follows_drafts_reads_what_was_written() -> None:
    """The scheduler says the lowest possible position."""
    states = States()
    states.set([(40, 4, 3, (2, 40, 3, 0, 0))])
    assert states.set([(43, 3, 2, (3, 41, 6, 8, 44))], b"\1") == [[3, 41, 6, 8, 44, 1]]
    assert states.set([(45, 1, 0, (6, 42, 7, 0, 0))], b"\1") == [[6, 44, 7, 0, 0, 1]]


def test_new_process_believes_the_scheduler() -> None:
    assert States().set([(45, 1, 0, (6, 44, 7, 0, 0))], b"\1") == [[6, 44, 7, 0, 0, 1]]


def test_last_certain_row_is_logged_with_draft_layers() -> None:
    states = States("mtp")
    assert states.set([(0, 9, 0, (0, 0, 5, 0, 0)), (0, 1, 0, (0, 0, 6, 0, 0))]) == [[0, 0, 5, 0, 0, 8], [0, 0, 6, 0, 0, 0]]
    assert states.set([(9, 4, 3, (5, 8, 7, 0, 0)), (1, 1, 0, (6, 0, 8, 0, 0))]) == [[5, 8, 7, 0, 0, 0], [6, 0, 8, 0, 0, 0]]
    assert states.set([(13, 2, 1, (7, 9, 4, 0, 0))], b"\1") == [[7, 9, 4, 0, 0, 0]]


@pytest.mark.parametrize("position", [3, 13])
def test_rows_far_from_their_state_are_a_bug(position: int) -> None:
    with pytest.raises(AssertionError, match="rows between states and their rows"):
        States().set([(12, 1, 0, (9, position, 4, 0, 0))])


def test_states_outlive_the_process_that_wrote_them() -> None:
    model, num_states = hybrid((DELTA, None), (1,)), 5
    spec, cache_spec = StateSpec.of(model, 2), KVCacheSpec.of(model, 16, "float32")
    assert spec is not None
    arena = bytearray(spec.arena_bytes(num_states))
    caches = []
    for _ in range(2):
        cache = map_kv_cache(memoryview(bytearray(cache_spec.arena_bytes(3))), cache_spec, 3, DEVICE)
        map_states(cache, memoryview(arena), spec, num_states, DEVICE)
        caches.append(cache.states)
        assert cache.layer_states[1] is None
        assert cache.layer_states[0] is not None
        assert cache.layer_states[0].matrix == spec.places[0].matrix  # type: ignore[union-attr]
    one, other = caches
    assert one is not None
    assert other is not None
    one.memory[3, 7] = 9
    assert other.memory[3, 7] == 9
    assert other.memory.shape == (num_states + 1, spec.slot_bytes)
    assert not other.memory[0].any()
    with pytest.raises(AssertionError, match="the state arena has"):
        map_states(cache, memoryview(arena), replace(spec, num_logged=9), num_states, DEVICE)
