"""Captured plans: the size that a step replays, the effects of padding, and bytes that do not depend on them."""

from __future__ import annotations

from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import pytest

from engine.config import DRAFT_METHODS, SpeculativeConfig
from engine.messages import SamplingParams
from engine.options.resolve_captures import default_sizes, fitting_sizes
from shm.segment import MemoryFile
from tests.workers.mtp import drafting
from tests.workers.rank_group.captures import draft_and_answer, keep
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.serving import serve
from tests.workers.serving import GOLDEN, ServedSequence, Serving, make_runner
from tests.workers.test_drafts import DRAFTS, Drafting, K, of_truth, sequences
from workers.engine.captures import Captures, Phase, StepShape
from workers.engine.runner import ModelRunner

ARENA_BYTES = 32 << 20
MODEL_FREE = [method for method in DRAFT_METHODS if method != "mtp"]
FIXED: dict[str, Any] = {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=K, adaptive=False)}


def captured(*sizes: int, **options: Any) -> dict[str, Any]:
    largest = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": max(sizes)}
    return {"plan": "captured", **largest, **options}


def shape(counts: list[int], num_sampled: list[int]) -> StepShape:
    return StepShape.of(np.array(counts), np.array(num_sampled))


def runner_of(architecture: str = "qwen3", **options: Any) -> ModelRunner:
    settings = {"max_model_len": 256, "num_kv_blocks": 150, "max_num_seqs": 8, **options}
    return make_runner(GOLDEN / architecture, **settings)


def test_fitting_decode_steps_are_replayed() -> None:
    captures = Captures((8, 4), 3)
    decode = [shape([1] * count, [1] * count) for count in (1, 4, 5, 8, 9)]
    assert [captures.mode(each).size for each in decode] == [4, 4, 8, 8, 0]
    assert captures.mode(shape([4, 2, 0], [4, 2, 0])).size == 8
    for counts, num_sampled in (([], []), ([0], [0]), ([5], [1]), ([1], [0]), ([1, 5], [1, 0])):
        assert captures.mode(shape(counts, num_sampled)).size == 0
    assert Captures((), 3).mode(decode[0]).size == 0, "nothing is captured"
    prompts = Captures((8, 4), 3, Phase.PREFILL)
    assert [prompts.mode(each).size for each in (shape([5], [1]), decode[0], shape([1, 5], [1, 0]))] == [8, 0, 0]


def test_expert_parallel_ranks_replay_the_same_size() -> None:
    """All replay the size that the largest of them needs, also a rank without rows, or none replays."""
    captures, none = Captures((8, 4), 3), shape([], [])
    one, five = shape([1], [1]), shape([1] * 5, [1] * 5)
    for shapes, size in (([one, none, five], 8), ([one, none], 4), ([none, none], 0), ([one, shape([7], [1])], 0)):
        assert {captures.mode(own, shapes).size for own in shapes} == {size}
    bounded = StepShape.of(np.ones(1), np.ones(1), can_replay=False)
    assert {captures.mode(own, [one, bounded]).size for own in (one, none, bounded)} == {0}, "no graph reads bounds of keys"


def test_padded_rows_write_only_the_dummy_block() -> None:
    """The arena equals that of the plain tape except for block 0, and only hidden states of real rows are kept."""
    arenas = []
    for options in ({}, captured(8)):
        arena = bytearray(8 << 20)
        runner = runner_of(arena=memoryview(arena), num_kv_blocks=20, **options)
        serving, batch = Serving(runner, chunk=20), sequences()[:3]
        for slot, sequence in enumerate(batch):
            serving.place(sequence, slot)
        for _ in range(5):
            serving.step(batch)
        if options:
            assert runner.mode.size == 8
            assert runner.weights.plan is not None
            hidden = runner.weights.plan.hidden()
            hidden[:] = np.nan
            serving.step(batch)
            np.testing.assert_array_equal(np.isnan(hidden).all(1), [False] * 3 + [True] * 5)
        else:
            serving.step(batch)
        layers = [(layer.keys, layer.values) for layer in runner._cache.layers]
        arenas.append([np.array(part[1:]) for layer in layers for part in layer])
    for found, expected in zip(*arenas, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_sizes_are_multiples_of_sequence_tokens() -> None:
    """The largest first; sizes that are no multiple, duplicate or beyond the limit are skipped, with one line in the log."""
    assert fitting_sizes([4, 12, 2, 4, 10, 8, 400], 4, 64) == (
        (12, 8, 4),
        "2,10 (not a multiple of 4, the tokens of a sequence with its draft tokens); 4 (duplicate); "
        "400 (more than 64, the largest size to capture)",
    )
    assert fitting_sizes([3], 4, 64)[0] == ()
    assert sorted(default_sizes(4, 130)) == [4, 8, 16, 32, 64, 96, 128]
    assert sorted(default_sizes(1, 7)) == [1, 2, 4, 7]


@pytest.mark.parametrize("plan", [{}, captured(10, 5), {"plan": "eager"}], ids=["tape", "captured", "eager"])
def test_draft_lengths_and_phases_match_the_config(plan: dict[str, Any]) -> None:
    """The same for any plan, however many drafts a step has."""
    runner = runner_of(**plan, **DRAFTS)
    serving, modes = Serving(runner, chunk=12), []
    long, short = (
        ServedSequence([5, 9, 3] * 10, SamplingParams(temperature=0.0), 9),
        ServedSequence([7, 8, 9], SamplingParams(temperature=0.0), 30),
    )
    serving.place(short, 1)
    serving.place(long, 0)
    for number in range(8):
        serving.step([short] if number < 3 else [long, short])
        modes.append(runner.mode)
    decode, mixed, prefill = Phase.DECODE, Phase.MIXED, Phase.PREFILL
    assert [mode.phase for mode in modes] == [prefill, decode, decode, mixed, mixed, mixed, decode, decode]
    assert {mode.num_drafts for mode in modes} == {K}
    assert all((mode.size > 0) == (plan.get("plan") == "captured" and mode.phase is decode) for mode in modes)


def test_no_rank_replays_mixed_steps() -> None:
    """`--ep-mixed-steps` alone decides whether there are any (tests/engine/options/test_captures.py)."""
    captures, decode, mixed = Captures((8,), 0), shape([1], [1]), shape([1, 5], [1, 1])
    assert mixed.phase is Phase.MIXED
    assert {captures.mode(own, [decode, mixed]).size for own in (decode, mixed)} == {0}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_drafter_replays_when_its_target_does(num_ranks: int) -> None:
    """Layers that draft run before the model verifies their draft tokens."""
    path = GOLDEN / "deepseek_v3"
    expected = serve(path, {})
    with rank_group_of(num_ranks) as rank_group:
        arena = MemoryFile.create("tokamak-test-arena", ARENA_BYTES)
        work = path, captured(8, 4, speculative_config=drafting(3))
        ranks = [rank_group.start(rank, draft_and_answer, (DupFd(arena.fd), ARENA_BYTES), *work) for rank in range(num_ranks)]
        found = [rank.answer() for rank in ranks]
    for answers, replays in found:
        assert answers == expected
        assert replays == found[0][1]
        of_layers: list[int] = []
        kinds = set()
        for kind, size in replays:
            if kind == "layers":
                of_layers.append(size)
                continue
            assert all((each > 0) == (size > 0) for each in of_layers)
            kinds |= {(size > 0, bool(of_layers))}
            of_layers = []
        assert {(True, True), (False, True), (False, False)} <= kinds, "steps of five sequences do not fit"


def test_warm_up_runs_change_nothing() -> None:
    """Warm-up runs layers that draft and the model with every size, and leaves slots, drafts, keys and values unchanged, also
    for weights that are loaded while sequences run."""
    path = GOLDEN / "deepseek_v3"
    runner = runner_of("deepseek_v3", num_kv_blocks=20, **captured(8, 4, speculative_config=drafting(3)))
    serving, sequence = Serving(runner), ServedSequence([5] * 18, SamplingParams(logit_bias={5: 100.0}), 40)
    serving.place(sequence, 1)
    for _ in range(3):
        serving.step([sequence])
    mode = runner.mode
    before = [np.array(part[1:]) for layer in runner._cache.layers for part in (layer.keys, layer.values)]
    slots = {name: str(array.tolist()) for name, array in runner.slots.arrays()}
    runner.load(str(path), 2, lambda num_done, num_bytes: None)
    replays = keep(runner)
    assert runner.weights.plan is not None
    runner.modes.warm_up(runner.weights.plan)
    assert replays == [("model", 8), ("model", 4), ("layers", 8), ("layers", 4), ("layers", 2), ("layers", 1)]
    after = [np.array(part[1:]) for layer in runner._cache.layers for part in (layer.keys, layer.values)]
    assert all((one == other).all() for one, other in zip(before, after, strict=True))
    assert {name: str(array.tolist()) for name, array in runner.slots.arrays()} == slots
    assert runner.mode == mode


@pytest.mark.parametrize("method", MODEL_FREE)
def test_steps_with_ngram_drafts_are_replayed(method: str) -> None:
    config = SpeculativeConfig(method=method, num_speculative_tokens=3)
    runner = runner_of(**captured(16, 8, 4, speculative_config=config))
    replays, serving = keep(runner), Serving(runner)
    batch = [ServedSequence([5, 9, 3, 4] * 6, SamplingParams(temperature=0.0), 20) for _ in range(2)]
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.run(batch)
    sizes = [size for _, size in replays]
    assert sizes[0] == 0
    assert set(sizes[1:]) <= {4, 8}
    assert len(sizes) > 2


def test_padding_follows_complete_inputs() -> None:
    """The size is that of the rows with the actual drafts of the slots, and their inputs stay unchanged."""
    runner = runner_of(**captured(10, 5, **DRAFTS))
    serving = Serving(runner, drafter=lambda sequence: [1, 2])
    batch = [ServedSequence([5, 9, 3], SamplingParams(temperature=0.0), 9) for _ in range(2)]
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.step(batch)
    pads: list[tuple[int, dict[str, np.ndarray]]] = []
    inputs, pad = runner.inputs, runner.inputs.pad

    def seen(size: int) -> None:
        pads.append((size, {name: np.array(tensor) for name, tensor in inputs.tensors()}))
        pad(size)

    inputs.pad = seen  # type: ignore[method-assign]
    serving.step(batch)
    ((size, before),) = pads
    assert (size, inputs.num_tokens, inputs.num_rows) == (10, 6, 10), "4 drafts were granted, and each slot had 2"
    assert before["token_ids"][:6].tolist() == [batch[0].outputs[0], 1, 2] * 2
    after = {name: np.array(tensor) for name, tensor in inputs.tensors()}
    changed = {name for name, values in before.items() if (values != after[name]).any()}
    assert changed == {"sequence_offsets", "slot_mapping", "logit_row_ids"}, "the others by the step itself"
    assert after["sequence_offsets"][:8].tolist() == [0, 3, 6, 7, 8, 9, 10, 10]
    assert (after["sequence_slots"][2:6] == 8).all()
    assert (after["row_slots"][6:10] == 8).all()


def serve_sequences(
    architecture: str, *, chunk: int = 512, is_preempted: bool = False, drafter: Drafting | None = None, **options: Any
) -> tuple[list[Any], list[int]]:
    """Return the outcome of all sequences in one batch, and how many tokens each row brought."""
    serving, batch = Serving(runner_of(architecture, **options), chunk=chunk, drafter=drafter), sequences()
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    if is_preempted:
        for _ in range(6):
            serving.step([sequence for sequence in batch if not sequence.is_done])
        serving.place(batch[1], 6)
    serving.run(batch)
    return [sequence.answer() for sequence in batch], serving.num_tokens_of_rows


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_answers_do_not_depend_on_the_plan(architecture: str) -> None:
    """Tape, captured and eager, with drafts and without, chunked and preempted; with a fixed draft length each row has as many
    accepted. Prompts may be captured too."""
    expected, _ = serve_sequences(architecture)
    assert serve_sequences(architecture, **captured(4, 2))[0] == expected
    assert serve_sequences(architecture, chunk=7, **captured(32, 8, graph_only_prefill=True))[0] == expected
    for how in ({"drafter": of_truth(expected, 2)}, {"chunk": 7, "is_preempted": True}):
        counts = []
        for plan in ({}, captured(20, 10), {"plan": "eager"}):
            found, num_tokens = serve_sequences(architecture, **how, **plan, **FIXED)
            assert found == expected
            counts.append(num_tokens)
        assert counts[0] == counts[1] == counts[2]
        assert "drafter" not in how or max(counts[0]) == 3
