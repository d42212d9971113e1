"""Metadata that a device computes in place: the host's own numbers, bit for bit, at constant addresses. On Paddle's CPU place,
with the same ops; behaviour on a card is not tested here.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ops.cuda import table as cuda
from ops.modules import Embedding, KvCache
from ops.paddle.reference import TABLE
from ops.step_layout import FOLLOWING
from ops.table import HAS_BOUNDS, OpTable
from tests.ops.packing import pack
from tests.ops.tables import emulated_card
from workers.devices.paddle import PaddleDevice
from workers.engine.batch_slots import BatchSlots
from workers.engine.device_inputs import DeviceInputs
from workers.engine.inputs import InputSizes, StepInputs
from workers.sampling.slot_sampling import SlotSampling

NUM_SLOTS, MAX_LENGTH, BLOCK_SIZE = 7, 512, 64
SENTINEL = -77
STARTS = np.array([0, 5, 0, 25, 64, 0, 128], np.int32)  # the reference vector
COUNTS = {0: [100, 1, 0, 1, 120, 140, 1], 2: [100, 2, 0, 1, 120, 140, 3]}
NUM_TABLES = 3
Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # slots, starts, counts, kept


class Both:
    """The same slots and steps for the host's inputs and for a device's."""

    def __init__(self, num_drafts: int = 0, maker: OpTable = TABLE, same_inputs: tuple[tuple[int, int], ...] = ()) -> None:
        self.maker = maker
        sizes = InputSizes(NUM_SLOTS, 512, MAX_LENGTH, BLOCK_SIZE, TABLE.row_tile, num_drafts=num_drafts, num_tables=NUM_TABLES)
        sizes = msgspec.structs.replace(sizes, same_inputs=same_inputs)
        device = PaddleDevice("cpu")
        self.host, self.made = StepInputs(device, sizes), DeviceInputs(device, sizes)
        self.made.host_block_tables = self.host.host_block_tables
        self.slots = BatchSlots(self.host.host_block_tables, MAX_LENGTH, 1000, num_drafts)
        SlotSampling(self.slots)
        self.generator = np.random.default_rng(3)

    def start(self, slot: int, num_tokens: int, blocks: np.ndarray) -> None:
        self.slots.reset(slot)
        self.slots.token_ids[slot, :num_tokens] = self.generator.integers(0, 1000, num_tokens)
        self.slots.num_tokens[slot] = self.slots.num_prompt_tokens[slot] = num_tokens
        self.grow(slot, np.arange(len(blocks)), blocks, tell=False)
        self.made.start(self.slots, slot)

    def grow(self, slot: int, indexes: np.ndarray, blocks: np.ndarray, *, tell: bool = True) -> None:
        slots = np.full(len(indexes), slot)
        for table in range(NUM_TABLES):
            self.slots.block_tables[slots, table, indexes] = (blocks * (1 + table)) % 57
            if tell:
                self.made.grow(np.full(len(indexes), table), slots, indexes)

    def run(self, step: Step, flags: np.ndarray | None = None, started: np.ndarray | None = None) -> None:
        """Run a step. `started`: the latest starts that the device is told, if they differ from the rows' starts."""
        slots, starts, counts, kept = step
        self.host.set_rows(slots, starts, counts, kept, self.slots.token_ids, self.slots)
        self.made.set_rows(slots, starts if started is None else started, counts, kept, self.slots.token_ids, self.slots, flags)
        self.made.derived.fill_(SENTINEL)  # so that all reads are of values from this step
        for inputs, table in ((self.host, TABLE), (self.made, self.maker)):
            table.begin(inputs, KvCache(BLOCK_SIZE))

    def check(self) -> None:
        for host, made in ((self.host, self.made), (self.host.kept, self.made.kept)):
            for name in made._derived:
                np.testing.assert_array_equal(getattr(made, name).numpy(), getattr(host, name).numpy(), name)
            of_host = {
                name: getattr(host, name) for name in ("num_rows", "num_tokens", "num_tiles", "tile_rows", "num_key_splits")
            }
            assert {name: getattr(made, name) for name in of_host} == of_host
            assert made.host_counts.tolist() == host.host_counts.tolist()
            if host.host_counts[HAS_BOUNDS]:
                for name in ("first_keys", "last_keys"):
                    used = (getattr(each, name).numpy()[: host.num_tokens] for each in (host, made))
                    np.testing.assert_array_equal(*used, name)

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for inputs in (self.made, self.made.kept) for _, tensor in inputs.tensors()]


def all_slots(counts: list[int]) -> Step:
    number = np.array(counts, np.int32)
    return np.arange(NUM_SLOTS, dtype=np.int32), STARTS, number, np.minimum(number, 3)


@pytest.fixture(params=["paddle", "cuda"])
def maker(request: pytest.FixtureRequest) -> OpTable:
    """Ops of Paddle, and a row of CUDA's on the emulated card."""
    return TABLE if request.param == "paddle" else cuda.make_table(emulated_card())


def embedded(table: OpTable, inputs: StepInputs) -> np.ndarray:
    """Return each row's token, as the embedding sees it."""
    module = Embedding("embedding", 1000, 1)
    pack(table, module, weight=np.arange(1000, dtype=np.float32)[:, None])
    found: np.ndarray = table.embedding(inputs, module).numpy()
    return found


def test_device_rows_embed_same_inputs(maker: OpTable) -> None:
    """The tokens themselves stay in the slots, for penalties."""
    both = Both(maker=maker, same_inputs=((700, 11),))
    for slot in range(NUM_SLOTS):
        count = int(STARTS[slot]) + COUNTS[0][slot]
        both.start(slot, count, np.arange(slot * 8, slot * 8 + 8))
        both.slots.token_ids[slot, :count:5] = 700
        both.made.start(both.slots, slot)
    both.run(all_slots(COUNTS[0]))
    host, made = (embedded(table, inputs) for table, inputs in ((TABLE, both.host), (maker, both.made)))
    np.testing.assert_array_equal(made, host)
    assert 700 not in made
    assert 700 in both.slots.token_ids


@pytest.mark.parametrize("num_drafts", COUNTS)
def test_device_inputs_equal_the_reference_vector(num_drafts: int, maker: OpTable) -> None:
    both = Both(num_drafts, maker)
    counts = COUNTS[num_drafts]
    for slot in range(NUM_SLOTS):
        both.start(slot, int(STARTS[slot]) + counts[slot], np.arange(slot * 8, slot * 8 + 8))
    both.run(all_slots(counts))
    both.check()
    fields = {name: getattr(both.made, name).numpy() for name in both.made._derived}
    offsets, contexts = fields["sequence_offsets"], fields["context_lengths"]
    assert offsets[-1] == (366 if num_drafts else 363)
    lengths = np.diff(offsets)
    most = 1 + num_drafts
    prompts, decoders = (fields["sequence_slots"][each] for each in (lengths > most, (lengths > 0) & (lengths <= most)))
    assert (prompts.tolist(), decoders.tolist()) == ([0, 4, 5], [1, 3, 6])
    lods = [[0, *np.cumsum(lengths[each]).tolist()] for each in (prompts, decoders)]
    assert lods == [[0, 100, 220, 360], [0, 2, 3, 6] if num_drafts else [0, 1, 2, 3]]
    assert [0, *np.cumsum(contexts[prompts]).tolist()] == [0, 100, 284, 424]
    assert contexts[decoders].tolist() == ([7, 26, 131] if num_drafts else [6, 26, 129])
    of_slots = [fields["slot_mapping"][fields["row_slots"] == slot].tolist() for slot in range(NUM_SLOTS)]
    assert of_slots == [
        [*range(100)],
        [517, 518] if num_drafts else [517],
        [],
        [1561],
        [*range(2112, 2232)],
        [*range(2560, 2700)],
        [3200, 3201, 3202] if num_drafts else [3200],
    ]


def random_step(generator: np.random.Generator, slots: BatchSlots, budget: int, *, is_decode: bool) -> Step:
    """Return rows of some slots, in their order, a chunk of known tokens of each; in decode its last tokens."""
    count = int(generator.integers(1, NUM_SLOTS + 1))
    chosen = np.sort(generator.permutation(NUM_SLOTS)[:count]).astype(np.int32)
    known = slots.num_tokens[chosen]
    counts = generator.integers(1, 4, count) if is_decode else generator.integers(0, budget // count, count)
    counts = np.minimum(counts, known).astype(np.int32)
    starts = (known - counts if is_decode else generator.integers(0, known - counts + 1)).astype(np.int32)
    return chosen, starts, counts, generator.integers(0, counts + 1).astype(np.int32)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_random_steps_after_longer_ones(num_drafts: int, maker: OpTable) -> None:
    """Slots are reused, tables grow, and tokens are sampled, or sampled again, in between."""
    both = Both(num_drafts, maker)
    generator = both.generator
    for slot in range(NUM_SLOTS):
        both.start(slot, 60, generator.integers(1, 57, 2))
    before = both.addresses()
    for number in range(40):
        both.run(all_slots([60, *[1] * 6]))
        slot = number % NUM_SLOTS
        if number % 5 == 0:
            both.start(slot, int(generator.integers(40, 300)), generator.integers(1, 57, 5))
        else:
            grown = np.arange(5, 7 + number % 2)
            both.grow(slot, grown, generator.integers(1, 57, len(grown)))
            end = int(both.slots.num_tokens[slot])
            drawn = max(end - 1, int(both.slots.num_prompt_tokens[slot]))
            both.slots.token_ids[slot, drawn : drawn + 3] = generator.integers(0, 1000, 3)
            both.slots.num_tokens[slot] = end + int(generator.integers(0, 3))
        both.run(random_step(generator, both.slots, 400, is_decode=number % 3 == 0))
        both.check()
        for made, host in zip(both.made.block_tables, both.host.host_block_tables, strict=True):
            np.testing.assert_array_equal(made.numpy(), host)
        assert both.addresses() == before


@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([4, 63, 64, 65, 100, 127, 128], [1] * 7),  # all decode: before, at and after the end of a block
        ([62, 63, 64, 65, 126, 127, 128], [3, 3, 3, 1, 3, 3, 3]),  # with drafts, over it
        ([0] * 7, [1, 63, 64, 65, 20, 128, 40]),  # all prompts, that end there
        ([0, 64, 128, 1, 63, 127, 0], [64, 64, 64, 63, 2, 1, 40]),  # chunks that begin and end there
    ],
    ids=["decode", "drafts", "prompts", "chunks"],
)
def test_positions_at_block_boundaries(maker: OpTable, starts: list[int], counts: list[int]) -> None:
    both = Both(2, maker)
    of_slots, numbers = (np.array(each, np.int32) for each in (starts, counts))
    for slot in range(NUM_SLOTS):
        both.start(slot, int(of_slots[slot] + numbers[slot]), both.generator.permutation(56)[:8] + 1)
    both.run((np.arange(NUM_SLOTS, dtype=np.int32), of_slots, numbers, np.minimum(numbers, 3)))
    both.check()
    positions = both.made.positions.numpy()[: numbers.sum()]
    for tables, mapping in zip(both.host.host_block_tables, both.made.slot_mappings, strict=True):
        of_rows = tables[np.arange(NUM_SLOTS).repeat(numbers)]
        blocks = np.take_along_axis(of_rows, positions[:, None] // BLOCK_SIZE, axis=1)[:, 0]
        found = mapping.numpy()[: numbers.sum()]
        np.testing.assert_array_equal(found, blocks * BLOCK_SIZE + positions % BLOCK_SIZE)


def test_key_bounds_of_masked_prompts(maker: OpTable) -> None:
    """Prompts with masks, in chunks beside rows that decode; then without any, where old values are not read."""
    both = Both(2, maker)
    for slot in range(NUM_SLOTS):
        both.start(slot, 60, both.generator.integers(1, 57, 2))
    bounds = np.stack([np.arange(60) // 3, np.maximum(np.arange(60), 45)], axis=1).astype(np.int32)
    for slot in (1, 5):
        both.slots.mask_bounds[slot], both.slots.bounds_ends[slot] = bounds, 60
    before = both.addresses()
    starts, counts = np.array([59, 10, 57, 0, 59, 40, 20], np.int32), np.array([1, 45, 3, 30, 1, 15, 0], np.int32)
    both.run((np.arange(NUM_SLOTS, dtype=np.int32), starts, counts, np.minimum(counts, 3)))
    both.check()
    assert both.made.host_counts[HAS_BOUNDS]
    first, last = (getattr(both.made, name).numpy()[: counts.sum()] for name in ("first_keys", "last_keys"))
    np.testing.assert_array_equal(np.stack([first, last], axis=1)[1:46], bounds[10:55])
    assert (first[0], last[0]) == (0, 59)
    slots, ones = np.array([0, 2, 6], np.int32), np.ones(3, np.int32)
    both.run((slots, np.full(3, 59, np.int32), ones, ones))
    both.check()
    assert not both.made.host_counts[HAS_BOUNDS]
    assert both.addresses() == before


def test_empty_steps_and_empty_rows(maker: OpTable) -> None:
    both = Both(maker=maker)
    none = np.zeros(0, np.int32)
    both.run((none, none, none, none))
    both.check()
    both.start(3, 20, np.arange(1, 3))
    both.run((np.array([3], np.int32), np.array([20], np.int32), np.array([0], np.int32), np.array([0], np.int32)))
    both.check()


def test_following_row_starts_at_the_last_token(maker: OpTable) -> None:
    """Wherever that is: it was sampled after the step was planned."""
    both = Both(2, maker)
    for slot in range(NUM_SLOTS):
        both.start(slot, 60 + slot, np.arange(1, 5))
    slots, ones = np.array([1, 4, 6], np.int32), np.ones(3, np.int32)
    starts = both.slots.num_tokens[slots] - 1
    both.run((slots, starts, ones, ones), np.array([FOLLOWING, 0, FOLLOWING], np.int32), starts + np.array([2, 0, 1]))
    both.check()


def test_rows_out_of_slot_order_fail() -> None:
    both, pair = Both(), np.ones(2, np.int32)
    with pytest.raises(AssertionError, match=r"rows of slots \[4, 2\] are not in slot order"):
        both.made.set_rows(np.array([4, 2], np.int32), pair, pair, pair, both.slots.token_ids)
