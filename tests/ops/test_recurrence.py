"""Recurrent layers: the ops of every table against their formulas in float64, and the same bits for any cut of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from engine.checkpoint.families.recurrence import MAX_KERNEL
from ops import _cpu
from ops.cpu.array import Array
from ops.cpu.executors import Recording
from ops.cpu.table import make_table
from ops.modules import Columns, Convolution, DeltaRule, GatedNorm, HeadRange, LayerState, StateSpaces
from ops.paddle import reference
from ops.paddle.reference import Cut, own_columns
from ops.table import NUM_ROWS, OpTable, SequenceState
from tests.ops.packing import pack
from tests.ops.recurrent import (
    NUM_LOGGED,
    ConvolvedLayer,
    DeltaLayer,
    Layer,
    Rows,
    Sequences,
    StateSpaceLayer,
    random,
    silu,
    state_cache,
)
from tests.ops.steps import MAX_SEQS, HandMadeStep
from tests.ops.tables import TABLES, table
from tests.ops.test_invariance import assert_row_alone

NAMES = ("A_log", "dt_bias")
LAYERS: dict[str, Layer] = {
    "convolution": ConvolvedLayer(Convolution("c", 72, 4)),
    "convolution with bias": ConvolvedLayer(Convolution("c", 37, MAX_KERNEL, has_bias=True, first=5)),
    "gated convolution": ConvolvedLayer(Convolution("c", 40, 3, has_bias=True, activation="", is_gated=True)),
    "delta rule": DeltaLayer(DeltaRule(NAMES, 2, 4, 24, 64, first=3, decay_first=1, beta_first=2)),
    "delta rule of odd sizes": DeltaLayer(DeltaRule(NAMES, 1, 3, 7, 37)),
    "delta rule by channel": DeltaLayer(DeltaRule(NAMES, 2, 2, 20, 80, is_per_channel=True)),
    "state space": StateSpaceLayer(StateSpaces((*NAMES, "D"), 4, 64, 2, 24, first=2, decay_first=3)),
    "state space with limits": StateSpaceLayer(StateSpaces((*NAMES, "D"), 3, 20, 1, 9, least=0.5, most=1.5)),
}


@pytest.fixture(params=TABLES)
def k(request: pytest.FixtureRequest) -> Iterator[OpTable]:
    with table(request.param) as found:
        yield found


@pytest.fixture(params=[name for name in TABLES if name != "cuda"])
def divided(request: pytest.FixtureRequest) -> Iterator[OpTable]:
    """Yield tables whose ranks divide the heads."""
    with table(request.param) as found:
        yield found


def in_chunks(sequences: Sequences, size: int, sequence: int = 1, end: int = 90) -> Sequences:
    """Run a sequence up to `end` in chunks."""
    start = sequences.slots.get(sequence, (0, 0, 0))[2]
    while start < end:
        sequences.run([Rows(sequence, min(size, end - start))])
        start += size
    return sequences


def assert_same(found: Sequences, whole: Sequences, sequence: int = 1) -> None:
    """Check that both computed the same results, and that their states are the same, bit for bit."""
    np.testing.assert_array_equal(found.result(sequence), whole.result(sequence))
    np.testing.assert_array_equal(found.state(found.slots[sequence][0]), whole.state(whole.slots[sequence][0]))


@pytest.mark.parametrize("name", LAYERS)
def test_results_follow_the_formula(k: OpTable, name: str) -> None:
    sequences = in_chunks(Sequences(k, LAYERS[name]), 41)
    expected = sequences.expected(1)[:90]
    np.testing.assert_allclose(sequences.result(1), expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())
    assert not sequences.memory[0].any()


@pytest.mark.parametrize("name", LAYERS)
def test_any_chunks_and_company_give_the_same_bits(k: OpTable, name: str) -> None:
    layer = LAYERS[name]
    whole = in_chunks(Sequences(k, layer), 90)
    for size in (7, 31, 32, 33, 64):
        assert_same(in_chunks(Sequences(k, layer), size), whole)
    single = in_chunks(Sequences(k, layer), 60, end=60)
    assert_same(in_chunks(single, 1), whole)
    mixed = Sequences(k, layer)
    mixed.run([Rows(4, 3), Rows(1, 50), Rows(2, 1)])
    mixed.run([Rows(1, 1), Rows(3, 40), Rows(4, 1)])
    mixed.run([Rows(2, 1), Rows(4, 2), Rows(3, 0), Rows(1, 39)])
    assert_same(mixed, whole)


@pytest.mark.parametrize("name", LAYERS)
def test_drafts_leave_no_trace(k: OpTable, name: str) -> None:
    """Each step verifies drafts, of which some are accepted; then the state is that of a sequence without any."""
    layer = LAYERS[name]
    whole = in_chunks(Sequences(k, layer), 90)
    for accepted in range(NUM_LOGGED + 1):
        drafted = Sequences(k, layer)
        drafted.run([Rows(1, 62, NUM_LOGGED, accepted), Rows(2, 1)])
        while drafted.slots[1][2] < 80:
            drafted.run([Rows(2, 1, 2), Rows(1, 1, NUM_LOGGED, accepted)])
        drafted.run([Rows(1, 90 - drafted.slots[1][2])])
        assert_same(drafted, whole)


@pytest.mark.parametrize("name", LAYERS)
def test_state_is_kept_anywhere(k: OpTable, name: str) -> None:
    """Before, between and after the certain rows, and among rows of the log; a sequence continues from it."""
    layer = LAYERS[name]
    whole = in_chunks(Sequences(k, layer), 90)
    kept = Sequences(k, layer)
    kept.run([Rows(1, 40, keep_at=0)])
    kept.run([Rows(1, 3, 4, 4, keep_at=42)])
    kept.run([Rows(1, 1, 4, 3, keep_at=45), Rows(2, 20)])
    kept.run([Rows(1, 90 - kept.slots[1][2], keep_at=90)])
    assert_same(kept, whole)
    assert not kept.state(kept.kept[1, 0]).any()
    for position in (42, 45, 90):
        alone = in_chunks(Sequences(k, layer), 90, end=position)
        np.testing.assert_array_equal(kept.state(kept.kept[1, position]), alone.state(alone.slots[1][0]))
    kept.slots[1] = kept.kept[1, 45], 45, 45
    kept.results[1] = [kept.result(1)[:45]]
    assert_same(in_chunks(kept, 90), whole)


@pytest.mark.parametrize("name", LAYERS)
def test_repeated_step_gives_the_same_bytes(k: OpTable, name: str) -> None:
    """A step reads no slot that it writes: it can be sent again, after any part of it was done."""
    sequences = Sequences(k, LAYERS[name])
    sequences.run([Rows(1, 30, 3, 2)])
    before, slots = dict(sequences.slots), sequences.num_slots
    rows = [Rows(1, 2, 4, 1, keep_at=33), Rows(2, 5)]
    sequences.run(rows)
    states = [sequences.state(slot) for slot in range(slots, sequences.num_slots)]
    sequences.memory[slots:] = 0x3A
    sequences.slots, sequences.num_slots = before, slots
    sequences.run(rows)
    for slot, state in enumerate(states, slots):
        np.testing.assert_array_equal(sequences.state(slot), state)
    np.testing.assert_array_equal(sequences.results[1][1], sequences.results[1][2])


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("name", LAYERS)
def test_any_threads_give_the_same_bits(variant: str, name: str) -> None:
    wide = DeltaLayer(DeltaRule(NAMES, 1, 1, 16, 300))
    results = []
    for threads in (1, 2, 3, 8):
        with table(f"{variant}-{threads}") as k:
            results += [(in_chunks(Sequences(k, layer), 40), layer) for layer in (LAYERS[name], wide)]
    for found, layer in results:
        assert_same(found, next(first for first, other in results if other is layer))


def test_tape_follows_the_step() -> None:
    """A recorded tape computes what the ops compute at once, in steps of any rows."""
    for layer in LAYERS.values():
        with table(f"{_cpu.variants()[0]}-2") as k:
            eager, recorded = Sequences(k, layer), Sequences(k, layer)
            replay_steps(recorded)
            for rows in ([Rows(1, 30), Rows(2, 1)], [Rows(2, 1, 3, 1), Rows(1, 1)], [Rows(1, 59)]):
                eager.run(rows)
                recorded.run(rows)
            assert_same(recorded, eager)
            assert_same(recorded, eager, 2)


def replay_steps(sequences: Sequences) -> None:
    """Let the sequences' steps replay one tape."""
    inputs, recording = sequences.step.inputs, Recording()
    rows = recording.rows(inputs.host_counts, NUM_ROWS, inputs.max_rows)
    arrays = [recording.allocate(rows, width) for width in sequences.layer.row_widths]
    y = sequences.layer.run(make_table(recording), inputs, arrays, sequences.places, sequences.cache)
    tape = recording.finish(y, apart=arrays)

    def results(values: list[np.ndarray]) -> np.ndarray:
        for array, own in zip(arrays, values, strict=True):
            array.numpy()[...] = own
        tape.replay()
        assert all(op.work.num_operations > 0 for op in tape.profile())
        found: np.ndarray = y.numpy().copy()
        return found

    sequences._results = results  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------------------ ranks


def spans_of(own: HeadRange, first: int, key_heads: int, key_dim: int, value_dim: int) -> Columns:
    """Return a rank's columns of queries | keys | values."""
    keys = key_heads * key_dim
    values = first + 2 * keys
    return (
        *((first + at + own.first_kv * key_dim, first + at + (own.first_kv + own.kv_count) * key_dim) for at in (0, keys)),
        (values + own.first * value_dim, values + (own.first + own.count) * value_dim),
    )


def held(k: OpTable, x: np.ndarray, columns: Columns) -> paddle.Tensor | Cut:
    """Return `x` as a rank has it after a linear of these columns; the others are not numbers."""
    if k is reference.TABLE:
        own = np.concatenate([x[:, begin:end] for begin, end in columns], axis=1)
        return Cut(paddle.to_tensor(own), columns[0][0], x.shape[1], columns)
    whole = np.full_like(x, np.nan)
    for begin, end in columns:
        whole[:, begin:end] = x[:, begin:end]
    return paddle.to_tensor(whole)


RANKS = ((HeadRange(0, 2, 0, 1), HeadRange(2, 2, 1, 1)), (HeadRange(0, 1, 0, 1), HeadRange(1, 3, 0, 2)))


class DividedLayer:
    """A convolution, a delta rule of 4 heads with 2 key heads, and a norm, on any ranks with one state arena."""

    KEY_DIM, VALUE_DIM, KEYS, CHANNELS, WIDTH = 24, 48, 2 * 24, 4 * 24 + 4 * 48, 4 * 48

    def __init__(self, k: OpTable, is_per_channel: bool) -> None:
        self.k, self.is_per_channel = k, is_per_channel
        rule, places = self.rule(None), []
        at = 0
        for floats in (3 * self.CHANNELS, 4 * 24 * 48, NUM_LOGGED * self.CHANNELS, NUM_LOGGED * rule.log_width):
            places.append(at)
            at += 4 * floats
        self.places = LayerState(*places)
        self.memory = np.zeros((6, at), np.uint8)
        self.cache = state_cache(k, self.memory)
        self.step = HandMadeStep([(0, 0, 20), (1, 0, 6)], row_tile=k.row_tile)
        self.step.inputs.add("states", MAX_SEQS, 6)
        states = [SequenceState(0, 0, 1, 2, 9, 17), SequenceState(0, 0, 3, 0, 0, 6)]
        self.step.inputs.set("states", np.array(states, np.int32))

    def rule(self, own: HeadRange | None) -> DeltaRule:
        sizes = 2, 4, self.KEY_DIM, self.VALUE_DIM
        return DeltaRule(NAMES, *sizes, is_per_channel=self.is_per_channel, own=own)

    def run(self, own: HeadRange | None) -> np.ndarray:
        """Return the results of one rank."""
        k, rows, rule = self.k, self.step.inputs.num_rows, self.rule(own)
        first, end = (own.first, own.first + own.count) if own else (0, 4)
        columns = spans_of(own, 0, 2, self.KEY_DIM, self.VALUE_DIM) if own else ()
        convolution, norm = Convolution("c", self.CHANNELS, 4, columns=columns), GatedNorm("n", self.WIDTH, 48, 1e-6)
        pack(k, convolution, weight=random(self.CHANNELS, 1, 4, seed=1))
        pack(k, rule, A_log=random(4, seed=2), dt_bias=random(4 * rule.num_decays, seed=3))
        pack(k, norm, weight=random(self.WIDTH, seed=4))
        widths = (self.CHANNELS, 1), (4 * rule.num_decays, rule.num_decays), (4, 1), (self.WIDTH, self.VALUE_DIM)
        x, a, b, gate = (
            held(k, random(rows, width, seed=seed), columns if seed == 10 and own else ((first * each, end * each),))
            if own
            else paddle.to_tensor(random(rows, width, seed=seed))
            for seed, (width, each) in enumerate(widths, 10)
        )
        step = self.step.inputs
        qkv = k.convolve(step, x, convolution, self.places, self.cache)
        y = k.gated_norm(k.delta_rule(step, qkv, a, b, rule, self.places, self.cache), gate, norm)
        found: np.ndarray = own_columns(y).numpy()
        assert not isinstance(y, Array) or not own or (y.columns, y.whole_width) == (((first * 48, end * 48),), self.WIDTH)
        return found[: step.num_tokens].copy()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("is_per_channel", [False, True])
def test_ranks_compute_their_heads(divided: OpTable, ranks: tuple[HeadRange, ...], is_per_channel: bool) -> None:
    """Results and slots, with their logs, are those of a single rank."""
    whole, several = DividedLayer(divided, is_per_channel), DividedLayer(divided, is_per_channel)
    expected = whole.run(None)
    found = np.concatenate([several.run(own) for own in ranks], axis=1)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(several.memory, whole.memory)


def test_ranks_divide_state_spaces(divided: OpTable) -> None:
    sizes = 4, 20, 2, 9
    layer = StateSpaceLayer(StateSpaces((*NAMES, "D"), *sizes))
    whole = in_chunks(Sequences(divided, layer), 40)
    ranks = []
    for own in (HeadRange(0, 2, 0, 1), HeadRange(2, 2, 1, 1)):
        ranks.append(Sequences(divided, StateSpaceLayer(StateSpaces((*NAMES, "D"), *sizes, own=own))))
        ranks[-1].memory, ranks[-1].cache = ranks[0].memory, ranks[0].cache
        in_chunks(ranks[-1], 40)
    np.testing.assert_array_equal(np.concatenate([rank.result(1) for rank in ranks], axis=1), whole.result(1))
    np.testing.assert_array_equal(ranks[0].state(ranks[0].slots[1][0]), whole.state(whole.slots[1][0]))


# ------------------------------------------------------------------------------------------------------------------- norm

NORMS = [
    GatedNorm("n", 96, 32, 1e-6, is_shared=True),
    GatedNorm("n", 60, 20, 1e-5, is_gated_first=True, gate_first=7),
    GatedNorm("n", 37, 37, 1e-6, is_shared=True, activation="sigmoid"),
    GatedNorm("n", 48, 12, 0.0, has_norm=False, gate_first=5),
]


@pytest.mark.parametrize("module", NORMS)
def test_gated_norm(k: OpTable, module: GatedNorm) -> None:
    weight = random(module.weight_width, seed=1)
    pack(k, module, weight=weight)
    rows = random(96, module.width + module.gate_first + module.width)
    x, gate = (paddle.to_tensor(np.ascontiguousarray(part)) for part in np.split(rows, [module.width], axis=1))
    gates = gate.numpy().astype(np.float64)[:, module.gate_first :]
    factors = silu(gates) if module.activation == "silu" else 1 / (1 + np.exp(-gates))
    exact = x.numpy().astype(np.float64) * (factors if module.is_gated_first else 1)
    exact = exact.reshape(96, -1, module.group)
    normed = (exact / np.sqrt((exact**2).mean(-1, keepdims=True) + module.epsilon)).reshape(96, -1)
    expected = normed * np.resize(weight, module.width) * (1 if module.is_gated_first else factors)
    if not module.has_norm:
        expected = x.numpy() * factors
    np.testing.assert_allclose(k.gated_norm(x, gate, module).numpy(), expected, atol=1e-5)
    if module.has_norm:  # and no gate
        expected = x.numpy().astype(np.float64).reshape(96, -1, module.group)
        expected = (expected / np.sqrt((expected**2).mean(-1, keepdims=True) + module.epsilon)).reshape(96, -1)
        expected = expected * np.resize(weight, module.width)
        np.testing.assert_allclose(k.gated_norm(x, None, module).numpy(), expected, atol=1e-5)

    def of_rows(rows: paddle.Tensor) -> paddle.Tensor:
        return k.gated_norm(rows[:, : module.width].contiguous(), rows[:, module.width :].contiguous(), module)

    assert_row_alone(of_rows, rows, k.row_tile)


# ------------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (SequenceState(1, 0, 1, num_certain=3), "slot 1 would be written in place"),
        (SequenceState(1, 0, 2, keep=1, num_certain=3), "slot 1 would be written in place"),
        (SequenceState(400, 0, 2, num_certain=3), "slot is 400, allowed are 0 to 399"),
        (SequenceState(1, 0, -1, num_certain=3), "slot is -1"),
        (SequenceState(1, 1, 2, num_certain=3), "start after the state's position is -1"),
        (SequenceState(1, -5, 2, num_certain=3), "start after the state's position is 5, allowed are 0 to 4"),
        (SequenceState(1, 0, 2, num_certain=4), "number of certain rows is 4, allowed are 0 to 3"),
        (SequenceState(1, 0, 2, 3, -1, num_certain=3), "position to keep is -1"),
    ],
)
def test_wrong_slots_are_errors(state: SequenceState, message: str) -> None:
    with table(f"{_cpu.variants()[0]}-1") as k:
        for layer in LAYERS.values():
            sequences = Sequences(k, layer)
            sequences._set([(1, 0, 3)], [state])
            before = sequences.memory.copy()
            with pytest.raises(IndexError, match=message):
                sequences._results([own[:3] for own in sequences.inputs_of(1)])
            np.testing.assert_array_equal(sequences.memory, before)


def test_sequence_without_slots_is_left_alone() -> None:
    """Padded sequences have no rows and the slots 0; those without a slot to write leave nothing."""
    with table(f"{_cpu.variants()[0]}-1") as k:
        for layer in LAYERS.values():
            sequences = Sequences(k, layer)
            sequences._set([(1, 0, 3), (2, 70, 0)], [SequenceState(0, 0, num_certain=1), SequenceState(0, 0)])
            before = sequences.memory.copy()
            found = sequences._results([own[:3] for own in sequences.inputs_of(1)])
            np.testing.assert_allclose(found, sequences.expected(1)[:3], rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(sequences.memory, before)
