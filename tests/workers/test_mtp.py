"""Layers of the checkpoint that draft: their draft tokens, when they run, and answers that do not change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from engine.messages import SamplingParams
from ops._cpu import DraftChances
from tests.workers.checkpoints import to_paddle_layout, write_config, write_safetensors
from tests.workers.deepseek import CONFIG as DEEPSEEK
from tests.workers.deepseek import DeepseekForward
from tests.workers.forward import Forward
from tests.workers.mtp import Trunk, draft_tokens, drafting, write_walk, write_with_layers
from tests.workers.serving import GOLDEN, ServedSequence, Serving, layers_of, make_runner, swap_slots
from tests.workers.test_drafts import sequences
from tests.workers.test_mixtures import COMMON, ERNIE
from workers.engine.rows import StepRows
from workers.engine.runner import ModelRunner
from workers.extensions.drafts.mtp import likeliest

K = 3
QWEN = {**COMMON, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3": ({**QWEN, "tie_word_embeddings": True}, 1),
    "qwen3, two in turn": (QWEN, 2),
    "ernie4_5": ({**COMMON, "architectures": ["Ernie4_5ForCausalLM"]}, 1),
    "ernie4_5_moe": ({**ERNIE, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1}, 1),
    "deepseek_v3": ({**DEEPSEEK, "rms_norm_eps": 1e-6}, 1),
    "deepseek_v3, two in turn": ({**DEEPSEEK, "rms_norm_eps": 1e-6}, 2),
}
PROMPT = [5 + index * 11 % 80 for index in range(40)]


def drafted(runner: ModelRunner, slot: int, count: int) -> np.ndarray:
    """Return logits of the draft tokens that the layers compute now for a slot."""
    last = np.array([runner.slots.num_tokens[slot] - 1], np.int32)
    one, counts = np.ones(1, np.int32), np.full(1, count, np.int32)
    rows = StepRows(np.full(1, slot, np.int32), last, one + counts, one + counts, counts)
    runner.slots.is_drafted_by_layers[slot] = True
    found: list[np.ndarray] = []

    def choose(logits: np.ndarray) -> np.ndarray:
        found.append(logits[0].copy())
        return likeliest(logits)

    layers_of(runner).draft(rows, runner.mode, choose)
    return np.array(found)


@pytest.mark.parametrize("name", SHAPES)
def test_draft_tokens_equal_the_formulas(name: str, tmp_path: Path) -> None:
    """Drafts follow a prompt in one piece and in chunks, and draft tokens that were right or wrong, by layers or others."""
    options, num_layers = SHAPES[name]
    tensors = write_with_layers(tmp_path, options, num_layers)
    config = ModelConfig.read(tmp_path)
    is_latent = config.architecture == "deepseek_v3"
    trunk: Trunk = DeepseekForward(options, config, tensors) if is_latent else Forward(config, tensors)
    whole: list[int] = []

    def of_truth(sequence: ServedSequence) -> list[int]:
        return whole[len(sequence.outputs) :][:2]

    for chunk, drafter in ((512, None), (7, None), (512, of_truth)):
        runner = make_runner(tmp_path, max_model_len=128, num_kv_blocks=40, speculative_config=drafting(K))
        serving = Serving(runner, chunk=chunk, drafter=drafter)
        sequence = ServedSequence(PROMPT, SamplingParams(temperature=0.0), 16)
        serving.place(sequence, 1)
        for num_outputs in (1, 2, 6, 14):
            while len(sequence.outputs) < num_outputs:
                serving.step([sequence])
            expected = draft_tokens(config, trunk, sequence.tokens, K)
            np.testing.assert_allclose(drafted(runner, 1, K), expected, atol=2e-4)
        whole = sequence.outputs
    assert 3 in serving.num_tokens_of_rows


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3, two in turn"])
def test_chain_equals_single_draft_steps(name: str, tmp_path: Path) -> None:
    """Rows want different numbers of them: tapes without Python in between, and a replay for each."""
    write_with_layers(tmp_path, *SHAPES[name])
    runner = make_runner(tmp_path, max_model_len=128, num_kv_blocks=40, max_num_seqs=4, speculative_config=drafting(K))
    batch = [ServedSequence(PROMPT[: 20 + slot], SamplingParams(temperature=0.0), 16) for slot in range(4)]
    serving = Serving(runner)
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.step(batch)
    slots, num_drafts = np.arange(4, dtype=np.int32), np.array([2, 0, 3, 1], np.int32)
    rows = StepRows(slots, runner.slots.num_tokens[:4] - 1, 1 + num_drafts, 1 + num_drafts, num_drafts)
    runner.slots.is_drafted_by_layers[:] = True
    found: list[list[list[int]]] = []
    for choose in (likeliest, lambda logits: likeliest(logits)):
        for slot, last in enumerate(rows.starts):
            runner.slots.token_ids[slot, last + 1 :] = -1
        layers_of(runner).draft(rows, runner.mode, choose)
        behind = (runner.slots.token_ids[slot, last + 1 :] for slot, last in enumerate(rows.starts))
        found.append([tokens[tokens >= 0].tolist() for tokens in behind])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == num_drafts.tolist()


@pytest.mark.parametrize(
    ("least", "chances", "expected"),
    [
        (0.5, (0.9, 1.0, 1.0), [2, 0, 3, 1]),
        (0.5, (0.9, 0.5, 1.0), [2, 0, 2, 1]),  # it is made, and may as well be verified
        (0.5, (0.9, 0.1, 1.0), [1, 0, 1, 1]),
        (0.5, (0.1, 1.0, 1.0), [1, 0, 1, 1]),  # one is verified all the same
        (0.0, (0.1, 0.1, 0.1), [2, 0, 3, 1]),
    ],
)
def test_chain_ends_at_an_unlikely_draft(
    least: float, chances: tuple[float, ...], expected: list[int], walking: dict[bool, Path]
) -> None:
    """The chain ends with the tokens before it. Rows are that much shorter; earlier draft tokens are unchanged."""
    runner = make_runner(walking[True], max_model_len=64, num_kv_blocks=40, max_num_seqs=4, speculative_config=drafting(K))
    serving, batch = Serving(runner), [ServedSequence(STROLL[slot:9], SamplingParams(temperature=0.0), 16) for slot in range(4)]
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.step(batch)
    slots, num_drafts = np.arange(4, dtype=np.int32), np.array([2, 0, 3, 1], np.int32)
    lasts = runner.slots.num_tokens[:4] - 1
    rows = StepRows(slots, lasts, 1 + num_drafts, 1 + num_drafts, num_drafts.copy())
    runner.slots.is_drafted_by_layers[:] = True
    layers_of(runner).ends[:-1] = np.repeat(chances, DraftChances.NUM_CLASSES)
    layers_of(runner).expect(least)
    layers_of(runner).draft(rows, runner.mode)
    assert rows.num_drafts.tolist() == expected
    assert rows.counts.tolist() == rows.num_sampled.tolist() == [1 + count for count in expected]
    for slot, last, count in zip(slots, lasts, expected, strict=True):
        tokens = runner.slots.token_ids[slot, last : last + count + 1].tolist()
        assert all(int(WALK[before]) == after for before, after in itertools.pairwise(tokens))


def test_acceptance_of_draft_tokens_is_learned(walking: dict[bool, Path]) -> None:
    """Acceptance is learned by place and confidence of the layer: here all are accepted."""
    runner = make_runner(walking[True], max_model_len=128, num_kv_blocks=40, speculative_config=drafting(K))
    layers_of(runner).expect(1e-9)
    before = layers_of(runner).ends.copy()
    serving, sequence = Serving(runner), ServedSequence(STROLL[:9], SamplingParams(temperature=0.0), 60)
    serving.place(sequence, 0)
    serving.run([sequence])
    gains = (layers_of(runner).ends - before)[:-1].reshape(K, -1)
    assert (gains >= 0).all()
    assert (gains.max(axis=1) > 0).all()
    assert serving.num_tokens_of_rows.count(1 + K) > 9, "nothing was cut"


def test_draft_tokens_after_a_hole_are_ignored(walking: dict[bool, Path]) -> None:
    """Draft tokens after a hole see next to nothing, so nothing is learned from them."""
    runner = make_runner(walking[True], max_model_len=128, num_kv_blocks=40, speculative_config=drafting(K))
    layers_of(runner).expect(1e-9)
    before = layers_of(runner).ends.copy()
    serving, sequence = Serving(runner), ServedSequence(STROLL[:20], SamplingParams(temperature=0.0), 24, wants_drafts=False)
    serving.place(sequence, 0)
    for _ in range(4):
        serving.step([sequence])
    sequence.wants_drafts = True
    serving.run([sequence])
    assert 1 + K in serving.num_tokens_of_rows
    np.testing.assert_array_equal(layers_of(runner).ends, before)


def answers(path: Path, chunk: int = 512, least_chance: float = 0, **options: Any) -> tuple[list[object], int]:
    """Return the outcome of sequences of all kinds in one batch, and how many draft tokens were verified."""
    runner = make_runner(path, max_model_len=256, num_kv_blocks=120, max_num_seqs=8, **options)
    if least_chance:
        layers_of(runner).expect(least_chance)
    serving, batch, num_drafts = Serving(runner, chunk=chunk), sequences(), 0
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    while left := [sequence for sequence in batch if not sequence.is_done]:
        num_drafts += int(np.frombuffer(serving.step(left).num_drafts, np.int32).sum())
    return [sequence.answer() for sequence in batch], num_drafts


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"plan": "eager", "chunk": 5}, {"quantization": "wint8", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}],
    ids=["tape", "eager-chunked", "int8"],
)
def test_answers_do_not_depend_on_mtp_drafts(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The golden models have random layers that draft, except for Qwen3."""
    path = GOLDEN / name
    if name == "qwen3":
        path = tmp_path
        write_with_layers(path, QWEN)
    expected, none = answers(path, **options)
    found, num_drafts = answers(path, **options, speculative_config=drafting(K))
    assert found == expected
    assert (none, num_drafts > 100) == (0, True)


def test_answers_do_not_depend_on_chain_lengths() -> None:
    """The layers have no confidence."""
    path = GOLDEN / "deepseek_v3"
    expected, _ = answers(path)
    whole, ended = (answers(path, least_chance=least, speculative_config=drafting(K)) for least in (0, 0.04))
    assert whole[0] == ended[0] == expected
    assert 0 < 2 * ended[1] < whole[1]


def test_reference_ops_draft(walking: dict[bool, Path]) -> None:
    """Draft tokens of a layer that knows the answer are accepted, step by step."""
    sequence_of = [ServedSequence(STROLL[:9], SamplingParams(temperature=0.0), 14) for _ in range(2)]
    counts = []
    for sequence, options in zip(sequence_of, ({}, {"ops": "reference", "plan": "eager"}), strict=True):
        runner = make_runner(walking[True], max_model_len=64, num_kv_blocks=9, speculative_config=drafting(K), **options)
        serving = Serving(runner)
        serving.place(sequence, 0)
        serving.run([sequence])
        counts.append(serving.num_tokens_of_rows)
    assert sequence_of[0].outputs == sequence_of[1].outputs
    assert counts[0] == counts[1] == [1, 1 + K, 1 + K, 1 + K, 1]


WALK = (np.arange(64) * 5 + 3) % 64  # through all of them
STROLL = [int(token) % 64 for token in PROMPT]


@pytest.fixture(scope="module")
def walking(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models with a layer that knows the next token, by whether it uses hidden states."""
    paths = {is_by_hidden: tmp_path_factory.mktemp(f"walk-{is_by_hidden}") for is_by_hidden in (True, False)}
    for is_by_hidden, path in paths.items():
        write_walk(path, WALK, is_by_hidden=is_by_hidden)
    return paths


def accepted(path: Path, serve: Callable[[Serving, ServedSequence], None], **sampling: Any) -> tuple[list[int], list[int]]:
    """Return an answer, and the tokens that each row brought."""
    runner = make_runner(path, max_model_len=256, num_kv_blocks=60, speculative_config=drafting(K))
    serving = Serving(runner)
    sequence = ServedSequence(STROLL[:37], SamplingParams(**({"temperature": 0.0} | sampling)), 33)
    serving.place(sequence, 2)
    serve(serving, sequence)
    return sequence.outputs, serving.num_tokens_of_rows


def undisturbed(serving: Serving, sequence: ServedSequence) -> None:
    serving.run([sequence])


def in_chunks(serving: Serving, sequence: ServedSequence) -> None:
    serving.chunk = 9
    serving.run([sequence])


def in_company(serving: Serving, sequence: ServedSequence) -> None:
    others = [ServedSequence(STROLL[index:], SamplingParams(temperature=0.0), 1 + 3 * (1 + K)) for index in range(4)]
    for slot, other in zip((0, 1, 3, 4), others, strict=True):
        serving.place(other, slot)
    serving.run([sequence, *others])


def begun_anew(serving: Serving, sequence: ServedSequence) -> None:
    """Preempt the sequence after some tokens, with nothing of it cached."""
    for _ in range(4):
        serving.step([sequence])
    serving.place(sequence, 0)
    serving.run([sequence])


def found_again(serving: Serving, sequence: ServedSequence) -> None:
    """Place the sequence with its first blocks in the cache, on a worker that knows nothing of them."""
    for _ in range(4):
        serving.step([sequence])
    serving.place(sequence, 5, sequence.block_ids[:2])
    serving.run([sequence])


@pytest.mark.parametrize("serve", [undisturbed, in_chunks, in_company, begun_anew, found_again])
def test_all_drafts_of_a_perfect_layer_are_accepted(
    serve: Callable[[Serving, ServedSequence], None], walking: dict[bool, Path]
) -> None:
    """All draft tokens are accepted except those past the end: hidden states are available wherever a row begins."""
    outputs, counts = accepted(walking[True], serve)
    expected = [int(WALK[STROLL[36]])]
    while len(expected) < len(outputs):
        expected.append(int(WALK[expected[-1]]))
    assert outputs == expected
    num_starts = {in_company: 5, begun_anew: 2, found_again: 2}.get(serve, 1)
    decoding = [count for count in counts if count > 0]
    assert sorted(decoding[:-1]) == [1] * num_starts + [1 + K] * (len(decoding) - 1 - num_starts)


def test_draft_tokens_are_the_likeliest_at_any_temperature(walking: dict[bool, Path]) -> None:
    """Draft tokens are accepted as far as the answer follows the walk."""
    outputs, counts = accepted(walking[False], undisturbed, temperature=0.5, seed=5)
    expected, place = [1], 1
    while place < len(outputs):
        follows = [int(WALK[token]) == after for token, after in zip(outputs[place - 1 :], outputs[place:], strict=False)][:K]
        expected.append(min([*follows, False].index(False) + 1, len(outputs) - place))
        place += expected[-1]
    assert counts == expected
    assert {1, 1 + K} <= set(counts)


def test_attention_starts_after_the_last_hole(tmp_path: Path) -> None:
    """A sequence without drafts is skipped, which leaves holes when it gets drafts again, and in its cached blocks."""
    tensors = write_with_layers(tmp_path, QWEN)
    config = ModelConfig.read(tmp_path)
    trunk = Forward(config, tensors)
    runner = make_runner(tmp_path, max_model_len=256, num_kv_blocks=60, speculative_config=drafting(K))
    serving = Serving(runner)

    def check(sequence: ServedSequence, first: int) -> None:
        assert runner.slots.first_entries[sequence.slot] == first
        expected = draft_tokens(config, trunk, sequence.tokens, K, first)
        np.testing.assert_allclose(drafted(runner, sequence.slot, K), expected, atol=2e-4)

    sequence = ServedSequence(PROMPT, SamplingParams(temperature=0.0), 60)
    serving.place(sequence, 1)
    for _ in range(3):
        serving.step([sequence])
    check(sequence, 1)
    sequence.wants_drafts = False
    for _ in range(9):
        result = serving.step([sequence])
        assert not any(np.frombuffer(result.num_drafts, np.int32))
    sequence.wants_drafts = True
    serving.step([sequence])  # whose hidden state is kept
    hole = len(sequence.tokens) - 1
    while len(sequence.outputs) < 58:  # the last two are not drafted for
        serving.step([sequence])
        check(sequence, hole)
    for num_blocks, first in ((6, hole), (2, 1), (3, 48)):  # after the hole, before it, within it
        again = ServedSequence([*sequence.tokens[: 16 * num_blocks], 7, 9, 11], SamplingParams(temperature=0.0), 4)
        serving.place(again, 2, sequence.block_ids[:num_blocks])
        serving.step([again])
        check(again, first)
    serving.next_block = 1  # blocks that had entries are another's now
    short = ServedSequence(PROMPT, SamplingParams(temperature=0.0), 1)  # ends before there is anything to draft
    serving.place(short, 3)
    serving.step([short])
    again = ServedSequence(PROMPT, SamplingParams(temperature=0.0), 4)
    serving.place(again, 2, short.block_ids[:2])
    serving.step([again])
    check(again, 32)


def test_draft_tokens_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """The same bits in chunks, in a batch, from the cache, on a new worker, and in another slot."""
    write_with_layers(tmp_path, DEEPSEEK)
    options = {"max_model_len": 128, "num_kv_blocks": 80, "speculative_config": drafting(K)}
    arena = memoryview(bytearray(1 << 20))
    runner = make_runner(tmp_path, arena=arena, **options)
    found = []
    shared: list[int] = []
    for chunk, num_others in ((512, 0), (7, 0), (40, 3), (512, 0), (512, 0)):
        if len(found) == 4:
            runner = make_runner(tmp_path, arena=arena, **options)
        serving = Serving(runner, chunk=chunk)
        serving.next_block = 1 + 15 * len(found)
        sequence = ServedSequence(PROMPT, SamplingParams(temperature=0.0), 16)
        serving.place(sequence, len(found), shared)
        others = [ServedSequence(PROMPT[index:], SamplingParams(seed=index), 16) for index in range(num_others)]
        for index, other in enumerate(others):
            serving.place(other, 8 + index)
        while len(sequence.outputs) < 5:
            serving.step([sequence, *others])
        assert runner.slots.first_entries[sequence.slot] == 1
        found.append(drafted(runner, sequence.slot, K))
        shared = sequence.block_ids[:2] if len(found) >= 3 else []
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    swap_slots(runner.slots, 4, 9)
    np.testing.assert_array_equal(drafted(runner, 9, K), found[0])


def test_paddle_layout_gives_the_same_drafts(tmp_path: Path) -> None:
    """Transposed, under the publisher's names, with fused projections: the same draft tokens."""
    config, _ = SHAPES["ernie4_5"]
    tensors = write_with_layers(tmp_path / "plain", config)
    stored = {name.replace("model.", "ernie.", 1): tensor for name, tensor in to_paddle_layout(tensors).items()}
    block = "ernie.mtp_block.0"
    for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.up_gate_proj", ("gate", "up"))):
        names = [f"{block}.{fused.split('.')[0]}.{part}_proj.weight" for part in parts]
        stored[f"{block}.{fused}.weight"] = np.concatenate([stored.pop(name) for name in names], axis=1)
    write_config(tmp_path / "paddle", config | {"num_nextn_predict_layers": 1})
    write_safetensors(tmp_path / "paddle" / "model.safetensors", stored, metadata={"format": "pd"})
    found = []
    for layout in ("plain", "paddle"):
        runner = make_runner(tmp_path / layout, max_model_len=64, num_kv_blocks=9, speculative_config=drafting(K))
        serving, sequence = Serving(runner), ServedSequence(PROMPT, SamplingParams(temperature=0.0), 9)
        serving.place(sequence, 0)
        serving.step([sequence])
        found.append(drafted(runner, 0, K))
    np.testing.assert_array_equal(*found)


def test_missing_mtp_tensors_are_named(tmp_path: Path) -> None:
    tensors = write_with_layers(tmp_path, QWEN)
    for name in ("mtp.norm.weight", "mtp.layers.0.self_attn.k_norm.weight"):
        del tensors[name]
    write_safetensors(tmp_path / "model.safetensors", tensors | {"mtp.fc.weight": np.zeros((48, 48), np.float32)})
    make_runner(tmp_path)  # no option uses them
    with pytest.raises(CheckpointError, match=r"mtp\.norm\.weight \[48\] is missing") as failure:
        make_runner(tmp_path, speculative_config=drafting(K))
    assert "mtp.layers.0.self_attn.k_norm.weight [16] is missing" in str(failure.value)
    assert "mtp.fc.weight has shape [48, 48], expected [48, 96]" in str(failure.value)
