"""A miniature scheduler for tests of the runner: sequences in, steps one after another, answers out. No process, no ring."""

from __future__ import annotations

import json
import mmap
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.block_keys import hash_blocks
from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.state_spec import StateSpec
from engine.config import STATES_PER_SEQUENCE, EngineConfig, SpeculativeConfig
from engine.messages import MediaUnit, SamplingParams, SlotStart, Step, StepResult
from engine.scheduler.states import SequenceStates, StatePool, StateRules, StateUse
from tests.configurations import engine_config
from tests.paths import GOLDEN, TEXT_MODELS
from workers.assembly import RunnerParts
from workers.engine.batch_slots import BatchSlots
from workers.engine.runner import ModelRunner
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.adapters.reader import AdapterFiles
from workers.extensions.drafts.mtp import MtpDrafter
from workers.extensions.drafts.mtp_steps import MtpSteps
from workers.extensions.grammars.grammars import Grammars
from workers.extensions.media.encoder import Encoder
from workers.extensions.media.features import Features
from workers.extensions.media.media import Media
from workers.rank_group.communicator import Communicator
from workers.rank_group.experts import ExpertRank
from workers.rank_group.peers import Peers
from workers.runners import Ahead, Runner, cpu_runner

ARCHITECTURES = TEXT_MODELS


def int32(values: Iterable[int]) -> bytes:
    return np.array(list(values), np.int32).tobytes()


def make_runner(
    path: Path,
    *,
    load: bool = True,
    communicator: Communicator | None = None,
    arena: memoryview | None = None,
    states: memoryview | None = None,
    experts: ExpertRank | None = None,
    features: Features | None = None,
    kind: Callable[..., Runner] = cpu_runner,
    model: ModelConfig | None = None,
    adapters: Sequence[Path] | None = None,
    rank: int = 0,
    **options: Any,
) -> ModelRunner:
    """Return the core of a runner on an arena, by default its own, with the weights of `path`. `states`: its state arena; None:
    its own. `model`: the model to compute; None: by its config.json. `adapters`: those of its slots, in order; None: it takes
    none. `rank`: of the engine, which determines its card."""
    model = model or ModelConfig.read(path)
    settings = {"max_model_len": 512, "num_kv_blocks": 600, "block_size": 16, "max_num_seqs": 32}
    settings |= {"run_id": "0", "run_dir": "", **options}
    drafts: SpeculativeConfig = settings.pop("speculative_config", SpeculativeConfig())
    spec = KVCacheSpec.of(model, settings["block_size"], settings.get("kv_cache_dtype", "float32"), drafts.has_mtp)
    num_bytes = spec.arena_bytes(settings["num_kv_blocks"])
    of_states = StateSpec.of(model, drafts.num_logged)
    if of_states is not None:
        settings = {"num_states": STATES_PER_SEQUENCE * settings["max_num_seqs"] + 64, "state_cache_interval": 16} | settings
        states = memoryview(bytearray(of_states.arena_bytes(settings["num_states"]))) if states is None else states
    config = engine_config(model=str(path), kv_cache_bytes=num_bytes, kv_groups=spec.groups, **settings)
    config = msgspec.structs.replace(config, speculative_config=drafts)
    memory = memoryview(bytearray(num_bytes)) if arena is None else arena
    peers, own = Peers(config, rank, communicator, experts), None if adapters is None else arena_of(model, adapters)
    runner = kind(RunnerParts(config, model, memory, peers, features=features, adapters=own, states=states)).core
    if load:
        runner.load(str(path), 1, lambda num_done, num_bytes: None)
    return runner


def layers_of(runner: ModelRunner) -> MtpDrafter:
    """The draft layers of a runner that has them."""
    steps = runner.find(MtpSteps)
    assert steps is not None
    return steps.layers


def grammars_of(runner: ModelRunner) -> Grammars:
    grammars = runner.find(Grammars)
    assert grammars is not None
    return grammars


def encoder_of(runner: ModelRunner) -> Encoder | None:
    """Return the encoder; None: its weights have none, or it serves only text."""
    media = runner.find(Media)
    assert media is not None
    return media.encoder


def arena_of(model: ModelConfig, adapters: Sequence[Path], max_rank: int = 16) -> AdapterArena:
    """Return an arena with an adapter in each slot, and one free slot."""
    layout = AdapterLayout.of(model, len(adapters) + 1, max_rank)
    arena = AdapterArena(memoryview(mmap.mmap(-1, layout.num_bytes)), layout)
    for slot, path in enumerate(adapters):
        arena.write(slot, AdapterFiles(path, layout).linears())
    return arena


@dataclass
class ServedSequence:
    """A sequence on its way through the runner, and its outcome."""

    prompt: list[int]
    sampling: SamplingParams
    num_outputs: int = 24
    units: tuple[MediaUnit, ...] = ()
    unit_rows: list[int] = field(default_factory=list)
    unit_hashes: tuple[bytes, ...] = ()
    mask_bounds: bytes = b""
    wants_drafts: bool = True
    is_late: bool = False  # its last row got no token
    adapter_slot: int = -1
    source: str = ""
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    states: SequenceStates = field(default_factory=SequenceStates)  # of a model with recurrent layers
    num_computed: int = 0
    is_started: bool = False
    outputs: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tops: list[tuple[list[int], list[float]]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    prompt_ranks: dict[int, int] = field(default_factory=dict)
    prompt_tops: dict[int, list[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop token ended it, as the scheduler sees it; an answer with a format continues here."""
        is_counted = len(self.outputs) > self.sampling.min_tokens and self.sampling.grammar is None
        return is_counted and self.outputs[-1] in self.sampling.stop_token_ids

    @property
    def is_done(self) -> bool:
        return len(self.outputs) == self.num_outputs or self.is_stopped

    def answer(self, num_outputs: int | None = None) -> tuple[object, ...]:
        """Return everything that must be the same, bit for bit; of its first outputs only if a number is given."""
        own = (part[:num_outputs] for part in (self.outputs, self.logprobs, self.tops))
        return *own, sorted(self.prompt_logprobs.items())


def state_pool(config: EngineConfig) -> StatePool | None:
    """Return the scheduler's slots of recurrent states; None: the model has none."""
    if not config.num_states:
        return None
    rules = StateRules(config.block_size, config.state_cache_interval, config.speculative_config.num_overlap)
    return StatePool(config.num_states, config.max_num_seqs, rules)


def block_keys(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    keys: list[bytes] = []
    hash_blocks(array("i", token_ids), block_size, keys, len(token_ids))
    return keys


class Serving:
    """Runs sequences on a runner: at most `budget` tokens a step, prompts in chunks of at most `chunk`."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        budget: int = 512,
        chunk: int = 512,
        block_size: int = 16,
        drafter: Callable[[ServedSequence], list[int]] | None = None,
        states: StatePool | None = None,
    ) -> None:
        """Start serving. `drafter`: predicts the next tokens of a sequence; None: the runner's own, where it has one. `states`:
        of an earlier runner on the same arena; None: all are vacant."""
        self.states = states or state_pool(runner.config)
        self.runner = runner
        self.drafter = drafter
        self.num_tokens_of_rows: list[int] = []  # that each row brought
        self.budget = budget
        self.chunk = chunk
        self.block_size = block_size
        self.next_block = 1
        self.num_steps = 0

    @property
    def num_tables(self) -> int:
        return int(self.runner.slots.block_tables.shape[1])

    def pages(self, block_ids: Iterable[int], table: int) -> list[int]:
        """Return the pages of blocks in a block table."""
        return [(block_id - 1) * self.num_tables + table + 1 for block_id in block_ids]

    def place(self, sequence: ServedSequence, slot: int, cached_blocks: list[int] | None = None) -> None:
        """Give `sequence` a slot and blocks; the first blocks may hold its prefix already. With recurrent layers there must be
        a kept state after them."""
        cached = cached_blocks or []
        num_blocks = -(-(len(sequence.prompt) + sequence.num_outputs) // self.block_size) - len(cached)
        sequence.slot, sequence.is_started = slot, False
        sequence.block_ids = cached + list(range(self.next_block, self.next_block + num_blocks))
        overlap = self.runner.config.speculative_config.num_overlap
        sequence.num_computed = max(0, len(cached) * self.block_size - overlap)
        self.next_block += num_blocks
        if self.states is not None:
            self.states.leave(sequence.states)
            key = block_keys(sequence.tokens, self.block_size)[len(cached) - 1] if cached else b""
            sequence.states = self.states.start(key)

    def kept_blocks(self, sequence: ServedSequence) -> list[int]:
        """Return after how many of the sequence's blocks there is a kept state."""
        keys = block_keys(sequence.tokens, self.block_size)
        kept = set(self.states.kept_keys) if self.states is not None else set()
        return [index + 1 for index, key in enumerate(keys) if key in kept]

    def run(self, sequences: list[ServedSequence]) -> None:
        """Run until all are done, with all of them in every step as far as the budget allows."""
        while any(not sequence.is_done for sequence in sequences):
            self.step([sequence for sequence in sequences if not sequence.is_done])

    def step(self, sequences: list[ServedSequence]) -> StepResult:
        """Run one step of `sequences`, in slot order."""
        rows: list[tuple[ServedSequence, int]] = []
        budget = self.budget
        for sequence in sorted(sequences, key=lambda sequence: sequence.slot):
            count = min(len(sequence.tokens) - sequence.num_computed, self.chunk, budget)
            if count > 0:
                rows.append((sequence, count))
                budget -= count
        message = self._message(rows)
        self._draft(message, rows)
        result = self.runner.run(message)
        self._apply(rows, result)
        self.runner.draft()
        return result

    def _draft(self, message: Step, rows: list[tuple[ServedSequence, int]]) -> None:
        """Grant all drafts to rows that continue an answer."""
        slots = self.runner.slots
        if not slots.drafts.shape[1]:
            return
        for sequence, _ in rows:
            if self.drafter is not None and sequence.outputs:
                drafts = self.drafter(sequence)[: slots.drafts.shape[1]]
                slots.drafts[sequence.slot, : len(drafts)], slots.num_drafts[sequence.slot] = drafts, len(drafts)
                slots.is_drafted_by_layers[sequence.slot] = False
        message.wants_drafts = bytes(sequence.wants_drafts for sequence, _ in rows)
        is_decode = [bool(sequence.outputs) and count == 1 and not sequence.is_late for sequence, count in rows]
        message.num_drafts = int32(
            slots.drafts.shape[1] * (each and wants) for each, wants in zip(is_decode, message.wants_drafts, strict=True)
        )
        message.is_following = bytes(is_decode)

    def _message(self, rows: list[tuple[ServedSequence, int]]) -> Step:
        starts, growth = [], []
        for sequence, count in rows:
            end = sequence.num_computed + count + self.runner.slots.drafts.shape[1]
            num_blocks = min(-(-end // self.block_size), len(sequence.block_ids))
            if not sequence.is_started:
                sequence.is_started = True
                tables = [int32(self.pages(sequence.block_ids[:num_blocks], table)) for table in range(self.num_tables)]
                starts.append(
                    SlotStart(
                        sequence.slot,
                        f"request-{sequence.slot}",
                        int32(sequence.tokens),
                        len(sequence.prompt),
                        sequence.sampling,
                        tables[0],
                        wants_prompt_logprobs=sequence.sampling.num_prompt_logprobs >= 0 and not sequence.outputs,
                        units=sequence.units,
                        unit_rows=int32(sequence.unit_rows),
                        unit_hashes=sequence.unit_hashes,
                        mask_bounds=sequence.mask_bounds,
                        max_total_tokens=len(sequence.prompt) + sequence.num_outputs,
                        adapter_slot=sequence.adapter_slot,
                        source=sequence.source,
                        other_block_ids=tuple(tables[1:]),
                    )
                )
            else:  # all blocks so far, as growth
                for table in range(self.num_tables):
                    pages = self.pages(sequence.block_ids[:num_blocks], table)
                    growth += [(sequence.slot, table, index, page) for index, page in enumerate(pages)]
        uses = [self._use(sequence, count) for sequence, count in rows] if self.states is not None else []
        slots, numbers, indexes, ids = zip(*growth, strict=True) if growth else ((), (), (), ())
        self.num_steps += 1
        return Step(
            step_id=self.num_steps,
            starts=starts,
            slots=int32(sequence.slot for sequence, _ in rows),
            start=int32(sequence.num_computed for sequence, _ in rows),
            num_tokens=int32(count for _, count in rows),
            is_sampling=np.array([_sequences(sequence, count) for sequence, count in rows], np.int8).tobytes(),
            block_slots=int32(slots),
            block_indexes=int32(indexes),
            block_ids=int32(ids),
            block_tables=int32(numbers),
            states=int32(number for use in uses for number in (use.read, use.position, use.write, use.keep, use.keep_at)),
        )

    def _use(self, sequence: ServedSequence, count: int) -> StateUse:
        """Return the state slots of a row."""
        assert self.states is not None
        end = sequence.num_computed + count
        return self.states.dispatch(sequence.states, end, 0, len(sequence.prompt), can_keep=True)

    def _confirm(self, sequence: ServedSequence, count: int) -> None:
        """Take the state that a row has written, before its tokens are taken."""
        if self.states is None:
            return
        if sequence.is_late:
            self.states.discard(sequence.states)
            return
        keys = block_keys(sequence.tokens, self.block_size)
        self.states.confirm(sequence.states, sequence.num_computed + count, keys, len(sequence.prompt), can_keep=True)

    def _apply(self, rows: list[tuple[ServedSequence, int]], result: StepResult) -> None:
        token_ids, ranks = np.frombuffer(result.token_ids, np.int32), np.frombuffer(result.ranks, np.int32)
        logprobs = np.frombuffer(result.logprobs, np.float32)
        counts = np.frombuffer(result.counts, np.int32).tolist()
        first = 0
        for row, (sequence, count) in enumerate(rows):
            sequence.is_late = _sequences(sequence, count) and not counts[row]
            self._confirm(sequence, count)
            if sequence.is_late:  # its mask was: the row is sent again
                assert self.runner.slots.is_late[sequence.slot]
                continue
            assert (counts[row] > 0) == _sequences(sequence, count)
            sequence.num_computed += max(count, count - 1 + counts[row])
            for token in range(first, first + counts[row]):
                if sequence.is_stopped:
                    break  # tokens sampled after its end are dropped
                sequence.outputs.append(int(token_ids[token]))
                sequence.logprobs.append(float(logprobs[token]))
                sequence.ranks.append(int(ranks[token]))
                if token in result.top_rows:
                    ids, values = result.top_rows[token]
                    sequence.tops.append((np.frombuffer(ids, np.int32).tolist(), np.frombuffer(values, np.float32).tolist()))
            first += counts[row]
            self.num_tokens_of_rows.append(counts[row])
            if row in result.prompt_rows:
                self._apply_prompt(sequence, result, row)

    def _apply_prompt(self, sequence: ServedSequence, result: StepResult, row: int) -> None:
        part = result.prompt_rows[row]
        values, ranks = np.frombuffer(part.token_logprobs, np.float32), np.frombuffer(part.token_ranks, np.int32)
        tops = np.frombuffer(part.top_token_ids, np.int32).reshape(len(values), part.num_top)
        for index in range(len(values)):
            sequence.prompt_logprobs[part.start + index] = float(values[index])
            sequence.prompt_ranks[part.start + index] = int(ranks[index])
            sequence.prompt_tops[part.start + index] = tops[index].tolist()


class ServingAhead(Serving):
    """Serving that begins each step before the result of the one before it is known, as workers of devices do. Prompts are not
    split."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._ahead = Ahead(runner)
        self._pending: deque[list[tuple[ServedSequence, int]]] = deque()
        self.num_unknown = 0  # tokens read by a step before the host knew them

    def run(self, sequences: list[ServedSequence]) -> None:
        assert self._ahead.depth == 2, "it has to know each token before the next step"
        while any(not sequence.is_done for sequence in sequences):
            going = [each for each in sequences if len(each.outputs) + self._num_begun(each) < each.num_outputs]
            if going:
                self.begin(going)
            if len(self._pending) == self._ahead.depth or not going:
                self.finish()

    def begin(self, sequences: list[ServedSequence]) -> None:
        """Begin a step of each of these."""
        rows = []
        for sequence in sorted(sequences, key=lambda sequence: sequence.slot):
            num_begun, outputs = self._num_begun(sequence), sequence.outputs
            num_computed = sequence.num_computed if not num_begun else len(sequence.tokens) + num_begun - 1
            rows.append(
                (replace(sequence, outputs=[*outputs, *[0] * num_begun], num_computed=num_computed), sequence, num_begun)
            )
        message = self._message([(known, len(known.tokens) - known.num_computed) for known, _, _ in rows])
        message.is_following = bytes(num_begun > 0 for _, _, num_begun in rows)
        for _, sequence, num_begun in rows:
            sequence.is_started = True
            is_known = self.runner.slots.token_ids[sequence.slot, len(sequence.tokens) + num_begun - 1] >= 0
            self.num_unknown += num_begun > 0 and not is_known
        self._pending.append([(sequence, len(known.tokens) - known.num_computed) for known, sequence, _ in rows])
        self._ahead.start(message)

    def finish(self) -> StepResult:
        """Finish the step that was begun first."""
        result = self._ahead.finish()
        self._apply(self._pending.popleft(), result)
        return result

    def _num_begun(self, sequence: ServedSequence) -> int:
        return sum(own is sequence for rows in self._pending for own, _ in rows)


def _sequences(sequence: ServedSequence, count: int) -> bool:
    return sequence.num_computed + count == len(sequence.tokens)


def golden_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / name / "golden.json").read_text())["cases"]
    return cases


def golden_sequences(name: str) -> list[ServedSequence]:
    """Return the golden prompts, greedy, with everything that the reference file has."""
    sampling = SamplingParams(temperature=0.0, num_logprobs=5, num_prompt_logprobs=0)
    return [ServedSequence(case["prompt_token_ids"], sampling) for case in golden_cases(name)]


def swap_slots(slots: BatchSlots, first: int, second: int) -> None:
    """Swap two slots in every registered array; state of a sequence elsewhere does not move."""
    for _, values in slots.arrays():
        values[[first, second]] = values[[second, first]]
