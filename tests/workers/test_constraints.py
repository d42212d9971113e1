"""Structured output on a rank: masks compared with the grammar itself, windows of drafts, replays, limits; other sequences are
not affected.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import SpeculativeConfig
from engine.grammars.formats import HEAD
from engine.grammars.matcher import MatcherVocabulary
from engine.grammars.matching import Matching
from engine.grammars.tokens import GrammarTokens
from engine.messages import Grammar, SamplingParams
from shm.segment import MemoryFile
from tests.paths import GOLDEN
from tests.waiting import wait_until
from tests.workers.mtp import drafting, write_walk
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.serving import ServedSequence, Serving, grammars_of, int32, make_runner, swap_slots
from workers.engine.runner import ModelRunner
from workers.extensions.grammars import limits
from workers.extensions.grammars.constraint import Constraint
from workers.rank_group.communicator import Communicator
from workers.runners import Runner, cpu_runner, xpu_runner

VOCAB = 1024
END, CLOSE, LETTERS = 1000, 1001, 1002
PIECES = [bytes([index % 256]) for index in range(END)] + [b"<end>", b"</think>", b"ab", b"123"]
TOKENS = GrammarTokens.of(PIECES, [END, CLOSE], [], [END], VOCAB)
GRAMMARS = ("start: /[a-z]{4,9}/", 'start: "{" n ("," n)* "}"\nn: /[0-9]{1,3}/', "start: /(ab){20}/", "start: /[^z]*/")
DRAFTING = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False)


@pytest.fixture(scope="module")
def matching() -> Matching:
    return Matching(TOKENS)


def params(grammar: str, **options: Any) -> SamplingParams:
    marker = options.pop("marker", b"")
    return SamplingParams(grammar=Grammar(HEAD + grammar, marker), stop_token_ids=[END], **options)


def constraint_of(
    matching: Matching, sampling: SamplingParams, outputs: list[int] | None = None, window: int = 4
) -> Constraint:
    made = Constraint(sampling, 5, outputs or [], np.zeros((window, VOCAB // 32), np.uint32))
    made.make(matching)
    return made


def allowed(constraint: Constraint, place: int = 0) -> set[int]:
    bits = np.unpackbits(constraint.masks[place].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def byte_ids(*values: int) -> set[int]:
    """Return all tokens of these bytes."""
    return {index for index in range(END) if index % 256 in values}


def test_mask_allows_next_tokens_then_the_end(matching: Matching) -> None:
    constraint = constraint_of(matching, params('start: "ab" | "ab1"'))
    assert allowed(constraint) == byte_ids(ord("a")) | {LETTERS}
    constraint.take(matching, 5, [LETTERS])
    assert allowed(constraint) == byte_ids(ord("1")) | {END}
    constraint.take(matching, 6, [ord("1")])
    assert allowed(constraint) == {END}
    constraint.take(matching, 7, [END])
    assert allowed(constraint) == {END}
    assert constraint.failed_at == -1
    whole = constraint_of(matching, params('start: "ab" | "ab1"', ignore_eos=True), [LETTERS])
    assert allowed(whole) == byte_ids(ord("1"))
    whole.take(matching, 6, [ord("1")])
    assert allowed(whole) == {END}


def test_grammar_binds_after_thinking_within_a_window(matching: Matching) -> None:
    everything = set(range(VOCAB))
    sampling = params('start: "ab"', marker=int32([CLOSE, 10]), is_thinking=True)
    constraint = constraint_of(matching, sampling, [7, CLOSE])
    assert allowed(constraint) == everything
    drafts = [10, ord("a"), ord("b"), END, 5]
    assert constraint.num_allowed(matching, drafts) == 4
    assert constraint.num_allowed(matching, [3, CLOSE, 10, 999]) == 3
    constraint = constraint_of(matching, sampling, [7, CLOSE], window=6)
    constraint.look_ahead(matching, drafts)
    expected = [everything, byte_ids(ord("a")) | {LETTERS}, byte_ids(ord("b")), {END}, {END}]
    assert [allowed(constraint, place) for place in range(5)] == expected
    constraint.take(matching, 7, [10, LETTERS])  # not all of them were accepted
    assert allowed(constraint) == {END}
    constraint.take(matching, 8, [ord("a")])  # and the step was run again
    assert allowed(constraint) == byte_ids(ord("b"))
    constraint.take(matching, 7, [4])
    assert allowed(constraint) == everything
    assert allowed(constraint_of(matching, params('start: "ab"', marker=int32([CLOSE])))) != everything


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_window_masks_depend_only_on_its_tokens(matching: Matching, grammar: str) -> None:
    """Independent of earlier windows, and of the pieces in which the tokens came."""
    rng = random.Random(grammar)
    constraint, known = constraint_of(matching, params(grammar)), list[int]()
    while END not in known and len(known) < 60:
        drafts: list[int] = []
        for _ in range(3):
            choices = allowed(constraint_of(matching, params(grammar), known + drafts))
            drafts.append(rng.choice(sorted(choices)) if rng.random() < 0.8 else rng.randrange(VOCAB))
        num_right = constraint.num_allowed(matching, drafts)
        constraint.look_ahead(matching, drafts)
        for place in range(num_right + 1):
            alone = constraint_of(matching, params(grammar), known + drafts[:place])
            assert allowed(constraint, place) == allowed(alone)
            if place < 3 and END not in drafts[:place]:
                assert (drafts[place] in allowed(alone)) == (place < num_right)
        taken = drafts[: rng.randrange(num_right + 1)] or [rng.choice(sorted(allowed(constraint)))]
        constraint.take(matching, 5 + len(known), taken)
        known += taken
    assert constraint.failed_at == -1


def test_limit_in_a_window_applies_where_reached(matching: Matching) -> None:
    """The mask after a rejected draft is not used."""
    grammar = 'start: x | /[0-9]*/\nx: (("a"{0,10000}){0,10000}){0,10000}'
    drafts = [ord("a")] * 6
    constraint = constraint_of(matching, params(grammar), window=7)
    constraint.look_ahead(matching, drafts)
    place = constraint.failed_at - 5
    assert 0 < place < 6, "this grammar is not what it was"
    constraint.take(matching, 5, [ord("1")])
    assert (constraint.failed_at, constraint.error) == (-1, "")
    assert allowed(constraint) == byte_ids(*b"0123456789") | {END, 1003}
    constraint.take(matching, 5, drafts)
    assert constraint.failed_at == 5 + place
    assert constraint.error


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    TOKENS.write(path / "vocabulary")
    return path


PATIENCE_NS = 60_000_000_000


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ensure that no mask is late because the machine is busy."""
    for name in ("FAST_NS", "STEP_NS"):
        monkeypatch.setattr(limits, name, PATIENCE_NS)


@pytest.fixture(scope="module")
def runners(directory: Path) -> tuple[ModelRunner, ModelRunner]:
    """Runners without drafts and with them."""
    plain = make_runner(GOLDEN / "qwen3", run_dir=str(directory))
    return plain, make_runner(GOLDEN / "qwen3", run_dir=str(directory), speculative_config=DRAFTING)


def sequences_of(with_grammars: bool = True) -> list[ServedSequence]:
    """Return sequences; every second one has a format."""
    rng = random.Random(4)
    sequences = []
    for index in range(12):
        prompt = [rng.randrange(3, 900) for _ in range(rng.choice([2, 17, 60]))]
        options: dict[str, Any] = {"temperature": 0.0 if index % 3 == 0 else 1.0, "seed": index, "num_logprobs": 1}
        sampling = SamplingParams(**options)
        if index % 2 and with_grammars:
            sampling = params(GRAMMARS[index // 2 % len(GRAMMARS)], **options)
        sequences.append(ServedSequence(prompt, sampling, num_outputs=30))
    return sequences


def answers_of(runner: ModelRunner, sequences: list[ServedSequence], **options: Any) -> list[tuple[object, ...]]:
    serving = Serving(runner, **options)
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    serving.run(sequences)
    return [sequence.answer() for sequence in sequences]


def text_of(sequence: ServedSequence) -> bytes:
    """Return the text up to its end."""
    token_ids = sequence.outputs[: sequence.outputs.index(END)] if END in sequence.outputs else sequence.outputs
    return b"".join(PIECES[token_id] for token_id in token_ids)


def test_constrained_answers_leave_others_unchanged(runners: tuple[ModelRunner, ModelRunner], matching: Matching) -> None:
    plain, drafting = runners
    sequences = sequences_of()
    found = answers_of(plain, sequences)
    assert found[::2] == answers_of(plain, sequences_of(with_grammars=False))[::2]
    num_ended = 0
    for sequence in sequences[1::2]:
        assert sequence.sampling.grammar is not None
        matcher = matching.matcher(sequence.sampling.grammar.text)
        token_ids = list(text_of(sequence))
        assert matcher.consume(*token_ids)
        if END in sequence.outputs:
            assert matcher.is_accepting()
            assert set(sequence.outputs[sequence.outputs.index(END) :]) == {END}
            num_ended += 1
    assert num_ended > 2
    for sequence, answer in zip(sequences_of(), found, strict=True):
        assert answers_of(plain, [sequence]) == [answer]
    by_request = {str(sequence.prompt): sequence.outputs for sequence in sequences}

    def draft(sequence: ServedSequence) -> list[int]:
        """Return draft tokens: the first ones are right, one is wrong."""
        known, rng = by_request[str(sequence.prompt)], random.Random(len(sequence.outputs))
        right = known[len(sequence.outputs) : len(sequence.outputs) + 3]
        return right[: rng.randrange(4)] + [rng.randrange(VOCAB)] * 3

    assert answers_of(drafting, sequences_of()) == found
    assert answers_of(drafting, sequences_of(), drafter=draft, chunk=7) == found


def with_layers(directory: Path, kind: Callable[..., Runner], ops: str) -> tuple[ModelRunner, ModelRunner]:
    """Runners of a model with a layer that drafts and is often right: without drafts and with them."""
    write_walk(directory / "walk", np.random.default_rng(0).permutation(VOCAB), is_by_hidden=True)
    options: dict[str, Any] = {"run_dir": str(directory), "num_kv_blocks": 512, "ops": ops}
    plain = make_runner(directory / "walk", **options)
    return plain, make_runner(directory / "walk", kind=kind, **options, speculative_config=drafting(2))


@pytest.fixture(scope="module")
def layered(directory: Path) -> tuple[ModelRunner, ModelRunner]:
    return with_layers(directory, cpu_runner, "native")


@pytest.fixture(scope="module")
def layered_on_device(directory: Path) -> tuple[ModelRunner, ModelRunner]:
    return with_layers(directory, xpu_runner, "reference")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["runners", "layered", "layered_on_device"])
def test_late_masks_skip_rows_without_changing_tokens(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners: tuple[ModelRunner, ModelRunner] = request.getfixturevalue(kind)
    found = answers_of(runners[0], sequences_of())
    monkeypatch.setattr(limits, "SLOW_NS", -1)  # every constraint is slow, and no step waits for it
    monkeypatch.setattr(limits, "STEP_NS", 0)
    monkeypatch.setattr(limits, "FAST_NS", 0)
    monkeypatch.setattr(limits, "ALONE_NS", 0)
    fill, num_late = Constraint._fill, 0
    gate = threading.Event()
    monkeypatch.setattr(Constraint, "_fill", lambda self, place: (gate.wait(10), fill(self, place)))
    most = []  # tokens that a row brought
    for runner in runners:
        serving, sequences = Serving(runner), sequences_of()
        gate.set()
        for slot, sequence in enumerate(sequences):
            serving.place(sequence, slot)
        while any(not sequence.is_done for sequence in sequences):
            serving.step([sequence for sequence in sequences if not sequence.is_done])
            num_late += sum(sequence.is_late for sequence in sequences)
            assert not any(sequence.is_late for sequence in sequences[::2]), "rows without a grammar are never late"
            (gate.clear if serving.num_steps % 3 == 0 else gate.set)()
        assert [sequence.answer() for sequence in sequences] == found
        most.append(max(serving.num_tokens_of_rows))
    assert num_late > 10
    assert most[0] == 1
    assert kind == "runners" or most[1] > 1, "layers draft all the same"


def test_cheap_masks_do_not_wait_for_another_source(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One source has many masks to compute when another submits a single one, which is computed next."""
    made: list[str] = []
    has_begun, gate = threading.Event(), threading.Event()

    def fill(constraint: Constraint, place: int) -> None:
        if not constraint.source:
            return  # of an earlier answer, not awaited any more
        has_begun.set()
        gate.wait(10)
        end_ns = time.thread_time_ns() + 1_000_000 * (constraint.source == "many")
        while time.thread_time_ns() < end_ns:
            pass
        made.append(constraint.source)

    monkeypatch.setattr(Constraint, "_fill", fill)
    serving = Serving(runners[0])
    for slot, source in enumerate(["many"] * 6 + ["one"] * 2):
        sequence = ServedSequence([1, 2, 3], params(GRAMMARS[0]), source=source)
        serving.place(sequence, slot)
        start = serving._message([(sequence, 1)]).starts[0]
        grammars_of(runners[0]).on_start(start)
        if not slot:
            assert has_begun.wait(10)
    gate.set()
    wait_until(lambda: len(made) == 8, timeout_s=30, what="all masks")
    assert made == ["many", "one", "one", "many", "many", "many", "many", "many"]


def test_resumed_sequence_continues_its_format(runners: tuple[ModelRunner, ModelRunner]) -> None:
    """Tokens are all that remains after a preemption, or a death."""
    runner = runners[0]
    sequences, again = sequences_of(), sequences_of()
    found = answers_of(runner, sequences)
    serving = Serving(runner)
    for slot, sequence in enumerate(again):
        serving.place(sequence, slot)
    for num_steps in (3, 5, 8):
        for _ in range(num_steps):
            serving.step([sequence for sequence in again if not sequence.is_done])
        order = random.Random(num_steps).sample(range(len(again)), len(again))
        for slot, index in enumerate(order):
            outputs, num_outputs = again[index].outputs, again[index].num_outputs
            serving.place(again[index], slot)
            assert (again[index].outputs, again[index].num_outputs) == (outputs, num_outputs)
    serving.run(again)
    assert [sequence.answer() for sequence in again] == found


def test_swapped_slots_keep_their_masks(runners: tuple[ModelRunner, ModelRunner]) -> None:
    runner = runners[0]
    sequences, again = sequences_of()[:4], sequences_of()[:4]
    found = answers_of(runner, sequences)
    serving = Serving(runner)
    for slot, sequence in enumerate(again):
        serving.place(sequence, slot)
    for _ in range(4):
        serving.step(again)
    swap_slots(runner.slots, 1, 2)
    again[1].slot, again[2].slot = 2, 1
    serving.run(again)
    assert [sequence.answer() for sequence in again] == found


def test_format_beyond_limits_fails_only_its_sequence(
    runners: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BURST_NS", -1)
    monkeypatch.setattr(limits, "TOKEN_NS", 0)
    serving = Serving(runners[0])
    sequences = sequences_of()[:2]
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    result = serving.step(sequences)
    assert list(result.failed) == [1]
    assert "ms" in result.failed[1]
    monkeypatch.undo()
    assert answers_of(runners[0], sequences_of()[:2])[0] == answers_of(runners[0], sequences_of(with_grammars=False)[:1])[0]


def test_slow_look_ahead_ends_only_drafts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is that without drafts."""
    runner = make_runner(GOLDEN / "qwen3", run_dir=str(directory), speculative_config=DRAFTING)
    sampling = params("start: /[^z]*/", temperature=0.0)
    known = ServedSequence(list(range(3, 20)), sampling, num_outputs=24)
    expected = answers_of(runner, [known])
    monkeypatch.setattr(limits, "TOKEN_NS", 0)  # one burst for the whole
    for limit_ns, is_drafted in ((limits.BURST_NS, True), (-1, False)):
        monkeypatch.setattr(Constraint, "may_look_ahead", property(lambda self, limit_ns=limit_ns: self._ahead_ns <= limit_ns))
        sequence = ServedSequence(known.prompt, sampling, num_outputs=24)
        serving = Serving(runner, drafter=lambda sequence: known.outputs[len(sequence.outputs) :])
        serving.place(sequence, 0)
        serving.run([sequence])
        assert [sequence.answer()] == expected
        assert (serving.num_steps < 24) == is_drafted
    constraint = constraint_of(Matching(TOKENS), sampling)
    constraint.spent(10 * limits.BURST_NS, is_ahead=True)
    assert not constraint.is_over
    constraint.spent(10 * limits.BURST_NS, is_ahead=False)
    assert constraint.is_over


def answer_by_own_clock(
    communicator: Communicator, arena: tuple[Any, int], directory: str, late: int, drafts: SpeculativeConfig
) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Run one of two ranks, where rank `late` finds that every format takes too long; return answers and failed rows of the
    steps."""
    limits.FAST_NS = limits.STEP_NS = PATIENCE_NS
    if communicator.rank == late:
        limits.BURST_NS, limits.TOKEN_NS = -1, 0
    memory = MemoryFile.from_fd(arena[0].detach(), arena[1]).buffer
    options: dict[str, Any] = {"num_kv_blocks": 64, "run_dir": directory, "speculative_config": drafts}
    runner = make_runner(GOLDEN / "llama", communicator=communicator, arena=memory, **options)
    batch, failed = sequences_of()[:4], []
    serving = Serving(runner)
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    while any(not sequence.is_done for sequence in batch):
        result = serving.step([sequence for sequence in batch if not sequence.is_done])
        failed.append(tuple(sorted(result.failed)))
    return [sequence.answer() for sequence in batch], failed


def answer_late(
    communicator: Communicator, arena: tuple[Any, int], directory: str, late: int
) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Run one of two ranks; rank `late` finds some masks late. Return the rows without a token in each step."""
    limits.FAST_NS = limits.STEP_NS = PATIENCE_NS
    if communicator.rank == late:
        chance = random.Random(1)
        Constraint.is_ready = property(lambda self: chance.random() < 0.7)  # type: ignore[assignment, method-assign]
    memory = MemoryFile.from_fd(arena[0].detach(), arena[1]).buffer
    options: dict[str, Any] = {"num_kv_blocks": 64, "run_dir": directory}
    runner = make_runner(GOLDEN / "llama", communicator=communicator, arena=memory, **options)
    batch, skipped = sequences_of()[:4], []
    serving = Serving(runner)
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    while any(not sequence.is_done for sequence in batch):
        serving.step([sequence for sequence in batch if not sequence.is_done])
        skipped.append(tuple(sequence.is_late for sequence in batch))
    return [sequence.answer() for sequence in batch], skipped


def test_ranks_agree_on_late_masks(directory: Path) -> None:
    """The first rank decides which rows get no token, and no token changes."""
    found = []
    for late in (0, 1):
        with rank_group_of(2) as rank_group:
            arena = MemoryFile.create("tokamak-test-arena", 32 << 20)
            own = [(DupFd(arena.fd), 32 << 20) for _ in range(2)]
            ranks = [rank_group.start(rank, answer_late, own[rank], str(directory), late) for rank in range(2)]
            answers = [rank.answer() for rank in ranks]
        assert answers[0] == answers[1]
        found.append(answers[0])
    assert found[0][0] == found[1][0]
    assert any(map(any, found[0][1]))
    assert not any(map(any, found[1][1]))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [SpeculativeConfig(), DRAFTING], ids=["plain", "drafts"])
def test_first_rank_decides_time_limits(directory: Path, drafts: SpeculativeConfig) -> None:
    """The first rank's: no rank ends a format, or its drafts, while another continues."""
    found = []
    for late in (0, 1):
        with rank_group_of(2) as rank_group:
            arena = MemoryFile.create("tokamak-test-arena", 32 << 20)
            own = [(DupFd(arena.fd), 32 << 20) for _ in range(2)]
            ranks = [rank_group.start(rank, answer_by_own_clock, own[rank], str(directory), late, drafts) for rank in range(2)]
            answers = [rank.answer() for rank in ranks]
        assert answers[0] == answers[1]
        found.append(answers[0])
    (of_first, failed), (of_others, none_failed) = found
    assert failed[0] == (1, 3)
    assert not any(none_failed)
    assert of_first[::2] == of_others[::2]


def test_precompiled_grammars_are_reused(runners: tuple[ModelRunner, ModelRunner], directory: Path) -> None:
    """Compilation runs in a thread of its own while others sample. An invalid one fails only its own sequence."""
    runner = make_runner(GOLDEN / "qwen3", run_dir=str(directory))
    found = answers_of(runners[0], sequences_of())
    for number, grammar in enumerate(("no grammar", *(HEAD + rules for rules in GRAMMARS))):
        grammars_of(runner).threads.compile(number, grammar)
    assert answers_of(runner, sequences_of()) == found
    done, threads = list[int](), grammars_of(runner).threads
    wait_until(lambda: (done.extend(threads.take_compiled()), len(done) == 1 + len(GRAMMARS))[1], what="compilation")
    assert (sorted(done), threads.num_compiling) == ([*range(1 + len(GRAMMARS))], 0)
    ready = threads.matching
    assert all(HEAD + rules in ready._kept for rules in GRAMMARS)


def test_reading_a_vocabulary_does_not_hold_the_gil() -> None:
    """The interpreter's lock is not held meanwhile: Python threads keep running."""
    rng = random.Random(1)
    pieces = [bytes([byte]) for byte in range(256)] + [rng.randbytes(rng.randrange(2, 12)) for _ in range(80_000)]
    tokens = GrammarTokens.of(pieces, [], [], [0], len(pieces))
    making = threading.Thread(target=MatcherVocabulary, args=(tokens,))
    making.start()
    num_turns = 0
    while making.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20


def test_no_constraints_without_structured_output(directory: Path) -> None:
    runner = make_runner(GOLDEN / "qwen3", run_dir=str(directory))
    answers_of(runner, sequences_of(with_grammars=False)[:2])
    assert not grammars_of(runner).is_used
    assert all(each is None for each in grammars_of(runner).constraints)
