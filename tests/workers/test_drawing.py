"""Sampling on the device from given logits: the native sampler's tokens, stored where the next step reads them. By ops of
Paddle, which sample only without temperature, and by a row of CUDA's on the emulated card.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from engine.messages import SamplingParams, SlotStart
from ops.cuda import table as cuda
from ops.modules import KvCache
from ops.paddle.reference import TABLE
from ops.step_layout import DRAWN
from ops.table import OpTable
from tests.ops.tables import emulated_card
from tests.workers.serving import int32
from workers.devices.paddle import PaddleDevice
from workers.engine.batch_slots import BatchSlots
from workers.engine.device_inputs import DeviceInputs
from workers.engine.inputs import InputSizes
from workers.sampling import sampler
from workers.sampling.slot_sampling import SlotSampling

MAX_LENGTH, BLOCK_SIZE = 64, 16
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 0.01, "top_k": 1},
]


class Bench:
    """BatchSlots with some requests that need a token, and the inputs of the step that gave their logits."""

    def __init__(self, table: OpTable, vocab: int, params: list[SamplingParams], kept: list[int] | None = None) -> None:
        """Prepare the slots. `kept`: number of kept rows of each sequence; None: the last one."""
        self.table, count = table, len(params)
        self.inputs = DeviceInputs(PaddleDevice("cpu"), InputSizes(count, 256, MAX_LENGTH, BLOCK_SIZE, TABLE.row_tile))
        self.slots = BatchSlots(self.inputs.host_block_tables, MAX_LENGTH, vocab)
        self.sampling = SlotSampling(self.slots)
        for slot, each in enumerate(params):
            prompt = int32([1] * (3 + slot % 7))
            self.slots.start(SlotStart(slot, "r", prompt, 3, each, b""))
            self.inputs.start(self.slots, slot)
        self.ids = np.arange(count, dtype=np.int32)
        self.lengths = self.slots.num_tokens[self.ids].copy()
        self.kept = np.ones(count, np.int32) if kept is None else np.array(kept, np.int32)
        self.first_rows = np.cumsum(self.kept) - self.kept

    def draw(self, logits: np.ndarray, flags: int = DRAWN, rows: list[int] | None = None) -> np.ndarray:
        """Return int32 [parts, m]; `logits` are those of the kept `rows`, None: of all. The rows of the sequences have these
        `flags`."""
        wanted = np.arange(int(self.kept.sum())) if rows is None else np.array(rows)
        starts = self.lengths - self.kept
        tokens, marks = self.slots.token_ids, np.full(len(self.ids), flags, np.int32)
        self.inputs.set_rows(self.ids, starts, self.kept, self.kept, tokens, self.slots, marks)
        self.table.begin(self.inputs, KvCache(BLOCK_SIZE))
        self.inputs.set_logit_rows(wanted)
        padded = np.zeros((self.inputs.padded(len(wanted)), logits.shape[1]), np.float32)
        padded[: len(wanted)] = logits
        assert self.table.drawing is not None
        found: np.ndarray = self.table.drawing.run(self.inputs, paddle.to_tensor(padded)).numpy()[:, : len(wanted)]
        return found

    def memory(self) -> tuple[list[int], list[int]]:
        """Return for each slot the token after those of its start, and its length, from the device's memory."""
        sizes, memory = self.inputs.sizes, self.inputs.slots.numpy()
        tokens = memory[self.ids * sizes.num_positions + self.lengths]
        return tokens.tolist(), memory[sizes.lengths_at + self.ids].tolist()


@pytest.fixture(params=["paddle", "cuda"])
def table(request: pytest.FixtureRequest) -> OpTable:
    return TABLE if request.param == "paddle" else cuda.make_table(emulated_card())


def taken(table: OpTable, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert table.drawing is not None
    return [{**case, "temperature": 0.0} for case in cases] if table.drawing.is_greedy else cases


@pytest.mark.parametrize(("vocab", "has_equals"), [(50, False), (50, True), (1000, True), (7, False)])
def test_device_samples_the_native_tokens(table: OpTable, vocab: int, has_equals: bool) -> None:
    generator = np.random.default_rng(vocab)
    cases = [{**case, "seed": (number << 33) + 5, "sample_index": number % 3} for number in range(3) for case in CASES]
    params = [SamplingParams(num_logprobs=0, **case) for case in taken(table, cases)]
    logits = generator.standard_normal((len(cases), vocab)).astype(np.float32) * 3
    if has_equals:
        logits = np.round(logits)
    if vocab == 50:
        logits[3, 20:] = -np.inf
        logits[4] = -np.inf
    bench = Bench(table, vocab, params)
    expected = sampler.sample(logits, bench.sampling, bench.ids, bench.lengths)
    found = bench.draw(logits)
    np.testing.assert_array_equal(found[0], expected.token_ids)
    assert bench.memory() == (expected.token_ids.tolist(), (bench.lengths + 1).tolist())
    if len(found) > 1:
        np.testing.assert_array_equal(found[2], expected.ranks)
        np.testing.assert_allclose(found[1].view(np.float32), expected.logprobs, atol=2e-5)
    emulated_card().seed(3)
    again = Bench(table, vocab, [params[5], params[1]])
    again.lengths[:] = bench.lengths[[5, 1]]
    again.slots.num_tokens[again.ids] = again.lengths
    np.testing.assert_array_equal(again.draw(logits[[5, 1]]), found[:, [5, 1]])


def test_broken_logits_give_the_native_tokens(table: OpTable) -> None:
    """The first NaN, as in the native sampler; of infinite ones the first."""
    logits = np.zeros((3, 50), np.float32)
    logits[0, [30, 41]] = np.nan
    logits[0, 3] = np.inf
    logits[1, [9, 12]] = np.inf
    logits[2] = np.nan
    bench = Bench(table, 50, [SamplingParams(temperature=0.0, num_logprobs=0)] * 3)
    expected = sampler.sample(logits, bench.sampling, bench.ids, bench.lengths)
    found = bench.draw(logits)
    assert found[0].tolist() == expected.token_ids.tolist() == [30, 9, 0]
    if len(found) > 1:
        assert np.isnan(found[1].view(np.float32)).all()


def test_only_flagged_rows_store_their_token(table: OpTable) -> None:
    """Rows of drafts, or of a scored prompt, are sampled too, but not stored in a slot. Of rows with the flag the last one
    is."""
    params = [SamplingParams(temperature=0.0)] * 3
    logits = np.random.default_rng(2).standard_normal((6, 50), np.float32)
    for flags in (0, DRAWN):
        bench = Bench(table, 50, params, [3, 1, 2])
        before = bench.memory()
        found = bench.draw(logits, flags)[0].tolist()
        assert found == logits.argmax(axis=1).tolist()
        lengths = bench.lengths.tolist()
        assert bench.memory() == (([found[2], found[3], found[5]], [each + 1 for each in lengths]) if flags else before)
    bench = Bench(table, 50, params, [3, 1, 2])
    assert bench.draw(logits[[2, 5]], 0, rows=[2, 5])[0].tolist() == logits[[2, 5]].argmax(axis=1).tolist()
    assert bench.memory() == before


def test_rows_beyond_the_logit_limit(table: OpTable) -> None:
    """Each of two parts writes its own rows' tokens."""
    bench = Bench(table, 50, [SamplingParams(temperature=0.0)] * 70)
    logits = np.random.default_rng(3).standard_normal((70, 50), np.float32)
    for rows in (range(64), range(64, 70)):
        assert bench.draw(logits[rows], rows=list(rows))[0].tolist() == logits[rows].argmax(axis=1).tolist()
        if rows[0]:
            assert bench.memory()[0][64:] == logits[64:].argmax(axis=1).tolist()
        else:
            assert bench.memory()[0][:64] == logits[:64].argmax(axis=1).tolist()
            assert bench.memory()[1][64:] == bench.lengths[64:].tolist()
