"""A scheduler on real rings in one process, with the actors around it played by the test.

`EchoRank` follows the worker's protocol in full, but its "model" is arithmetic: the KV of a position is a number mixed from
the KV of the position before, with a window also from the first one in it, and the token. It is kept in an arena that is
addressed through the block tables, as a real one is. The next token is drawn from the last KV. So a wrong block, a stale one or
one shared by mistake changes the tokens from there on, and `expected_tokens` says what they must be. If the engine has slots
for recurrent states, the model has one more layer: its number is kept there, and takes part in every draw.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.block_keys import forward_spans
from engine.config import EngineConfig
from engine.messages import (
    Abort,
    ClearWeights,
    Command,
    CompileGrammar,
    Control,
    GrammarCompiled,
    Hello,
    LoadWeights,
    Message,
    Order,
    Output,
    Outputs,
    PromptLogprobs,
    Rejected,
    Reply,
    SamplingParams,
    SequenceRequest,
    SlotStart,
    Step,
    StepResult,
    TokenLogprobs,
    WeightsChanged,
    decode,
    encode,
)
from engine.process.actor import ActorLoop
from engine.process.context import ActorContext
from engine.process.events import EventChannel
from engine.process.run_directory import Run, WeightsRecord, new_run_id
from engine.process.segments import RunSegments, unlink_segments
from engine.process.topology import CACHE, SCHEDULER, SUPERVISOR, RingSizes, names_of
from engine.scheduler.actor import SchedulerActor
from engine.scheduler.dispatch import STEP_ID_BITS
from shm.broadcast import BroadcastReader
from shm.counters import State
from shm.mailbox import Mailbox, MailboxSender
from tests.configurations import engine_config
from tests.engine.scheduler.echo_media import EchoEncoder, EchoMedia, FeatureArena, expected_values, values_of
from tests.requests import request_message, sequence_request, with_own
from tests.waiting import WATCHDOG_S

VOCAB_SIZE = 61
MASK = (1 << 64) - 1
MODEL = "/weights/a"


def ints(data: bytes) -> list[int]:
    return array("i", data).tolist()


def mix(kv: int, token_id: int, path: str) -> int:
    """Return the KV of a token after that of the one before."""
    return (kv * 6364136223846793005 + (token_id + 1) * 1442695040888963407 + sum(path.encode())) & MASK


def draw(kv: int, seed: int) -> int:
    """Return the token after a position with this KV."""
    mixed = ((kv ^ (kv >> 29)) * 0x9E3779B97F4A7C15 + seed * 0xBF58476D1CE4E5B9) & MASK
    return (mixed >> 32) % VOCAB_SIZE


def logprob(kv: int, token_id: int) -> float:
    return -float((kv >> 40 ^ token_id) % 1000) / 64


def next_kv(known: Callable[[int], int], position: int, value: int, window: int, path: str) -> int:
    """Return the KV of a position in a layer; `known`: that of earlier ones."""
    if window == 1 or not position:
        return mix(0, value, path)
    first = position - window + 1
    return mix(known(position - 1) ^ (3 * known(first) if window and first >= 0 else 0), value, path)


def joined(layers: Iterable[int]) -> int:
    """Return the number from which a token is drawn, of the KV of a position in each layer."""
    kv = 0
    for number, each in enumerate(layers):
        kv ^= (2 * number + 1) * each & MASK
    return kv


def windows_of(config: EngineConfig) -> list[int]:
    """Return the window of each block table, with one layer each; 0: none. A recurrent layer is as one without a window."""
    return [*(group.window for group in config.kv_groups for _ in range(group.num_tables)), *([0] if config.num_states else [])]


def expected_tokens(prompt: list[int], sampling: SamplingParams, path: str = MODEL, windows: Sequence[int] = (0,)) -> list[int]:
    """Return the answer of an undisturbed run."""
    layers: list[list[int]] = [[] for _ in windows]

    def add(value: int) -> int:
        for kvs, window in zip(layers, windows, strict=True):
            kvs.append(next_kv(kvs.__getitem__, len(kvs), value, window, path))
        return joined(kvs[-1] for kvs in layers)

    kv = [add(value) for value in prompt][-1]
    outputs: list[int] = []
    while len(outputs) < sampling.max_tokens:
        outputs.append(draw(kv, sampling.seed))
        if outputs[-1] in sampling.stop_token_ids and len(outputs) > sampling.min_tokens:
            break
        kv = add(outputs[-1])
    return outputs


@dataclass
class Slot:
    token_ids: list[int]
    tables: list[list[int]]
    start: SlotStart
    unit_rows: list[int]
    values: list[int] = field(default_factory=list)  # of a prompt with media
    span_ends: dict[int, int] = field(default_factory=dict)  # of tokens that see keys ahead
    recurrent: dict[int, int] = field(default_factory=dict)  # number of the recurrent layer at positions of the row
    inputs: list[int] = field(default_factory=list)  # of the row

    def __post_init__(self) -> None:
        start, bounds = self.start, ints(self.start.mask_bounds)
        if start.units or bounds:
            self.values = values_of(self.token_ids[: start.num_prompt_tokens], start.units, start.unit_hashes, bounds)
            self.span_ends = {position: end for first, end in forward_spans(bounds) for position in range(first, end)}

    def value(self, position: int) -> int:
        return self.values[position] if position < len(self.values) else self.token_ids[position]


@dataclass(frozen=True)
class EchoState:
    """A recurrent state after `position` tokens, and the inputs of rows behind it."""

    position: int
    value: int
    log: tuple[int, ...]


BEGIN = EchoState(0, 0, ())


class EchoRank:
    """Stand-in for worker<index>: a reader of the broadcast ring. `turn` runs the received steps, at most `max_steps`."""

    def __init__(
        self, simulation: Simulation, index: int, epoch: int, weights: tuple[str, int] | None = None, files: str = ""
    ) -> None:
        """Start a rank. `weights`: those that it loads instead if those of the record are gone. `files`: present contents of
        checkpoints."""
        run_id = simulation.config.run_id
        path, version = weights or simulation.run.weights(simulation.name).ranks[index]
        self.index = index
        self.simulation = simulation
        self.has_states = simulation.config.num_states > 0
        self.windows = windows_of(simulation.config)[: -1 if self.has_states else None]
        self.path, self.version = path, version
        self.files = self.contents = files
        self.slots: dict[int, Slot] = {}
        self.steps: list[Step] = []
        self.pending: list[bytes] = []
        self.drafts = simulation.config.speculative_config.max_drafts > 0
        self.refuses_loads = ""
        self.hangs_on_loads = False
        self.compiles = True
        self.grammars: list[int] = []  # that it has not compiled yet
        self.late: set[int] = set()  # slots that had no token in their last row, since a mask was late
        self.encoder = EchoEncoder(simulation)
        self._missed = (0, 0)  # epoch and time: steps dispatched before go on from what was not run
        self._reader = BroadcastReader.attach(run_id, simulation.name, index, epoch)
        self._sender = MailboxSender.attach(run_id, simulation.name, f"worker{index}", epoch)
        self.epoch = epoch
        self.say_hello()

    def say_hello(self) -> None:
        arena_id = 0 if self.simulation.caches_outlive_ranks else self.epoch
        self.send(Hello(f"worker{self.index}", self.epoch, self.version, self.path, self.contents, 0, arena_id))

    def send(self, message: Message) -> None:
        assert self._sender.try_send(encode(message))

    def turn(self, max_records: int = 100, answers: bool = True) -> int:
        """Run received steps. `answers=False`: die before the results are sent."""
        self.pending += self._reader.receive()
        num_done = 0
        while self.pending and num_done < max_records:
            message = decode(self.pending[0])
            if self.hangs_on_loads and isinstance(message, LoadWeights):
                break
            self.pending.pop(0)
            num_done += 1
            match message:
                case Step():
                    result = self._run(message)
                    if answers:
                        self.send(result)
                case LoadWeights(command_id, path, version, ranks, contents):
                    if not ranks or self.index in ranks:
                        known = self.simulation.paths.setdefault(version, path)
                        assert known == path, f"version {version} is {known} and {path}"
                        error = self.refuses_loads or ("overwritten" if contents not in ("", self.files) else "")
                        if not error:
                            self.path, self.version, self.contents = path, version, self.files
                        self.send(WeightsChanged(command_id, self.index, self.version, self.path, error, self.contents))
                case CompileGrammar(number):
                    self.grammars.append(number)
                case ClearWeights(command_id):
                    self.version, self.contents = 0, ""
                    self.send(WeightsChanged(command_id, self.index, 0, ""))
        while self.compiles and self.grammars:
            self.send(GrammarCompiled(self.grammars.pop(0), self.index))
        return num_done

    def close(self) -> None:
        self._reader.close()
        self._sender.close()

    def _run(self, step: Step) -> StepResult:
        if not self.version:
            return StepResult(step.step_id, self.index, 0, b"", b"", b"", error="no weights")
        self.steps.append(step)
        for start in step.starts:
            self.late.discard(start.slot)
            tables = [ints(ids) for ids in (start.block_ids, *start.other_block_ids)]
            self.slots[start.slot] = Slot(ints(start.token_ids), tables, start, ints(start.unit_rows))
        block_slots = ints(step.block_slots)
        numbers = ints(step.block_tables) or [0] * len(block_slots)
        growth = zip(block_slots, numbers, ints(step.block_indexes), ints(step.block_ids), strict=True)
        for slot, number, index, block_id in growth:
            table = self.slots[slot].tables[number]
            can_shrink = self.drafts or self.simulation.late_share > 0
            assert index == len(table) or (index < len(table) and can_shrink), "tables grow at their end"
            table[index:] = [block_id]  # behind what was for drafts and given back
        rows = list(zip(ints(step.slots), ints(step.start), ints(step.num_tokens), step.is_sampling, strict=True))
        assert [row[0] for row in rows] == sorted({row[0] for row in rows}), "rows are in slot order"
        num_tokens = sum(row[2] for row in rows) + sum(ints(step.num_drafts))
        assert num_tokens <= self.simulation.config.max_num_batched_tokens, "a step keeps the token budget, with drafts too"
        for slot_index, index, row in zip(ints(step.unit_slots), ints(step.unit_indexes), ints(step.unit_rows), strict=True):
            self.slots[slot_index].unit_rows[index] = row
        encoded: list[bytes] = []
        if not self.index and self.simulation.media:
            epoch = step.step_id >> STEP_ID_BITS
            if epoch == self._missed[0] and step.dispatch_ns <= self._missed[1]:
                return StepResult(step.step_id, 0, self.version, b"", b"", b"", bytes(4 * len(rows)))
            encoded, missing = self.encoder.run(step.encoder, self.version) if step.encoder else ([], {})
            missing = missing or self._missing(rows)
            if missing:
                self._missed = epoch, time.monotonic_ns()
                return StepResult(step.step_id, 0, self.version, b"", b"", b"", missing=missing)
        token_ids, logprobs, counts, tops, prompts = [], [], [], {}, {}
        following = step.is_following or bytes(len(rows))
        uses = ints(step.states)
        assert len(uses) == 5 * len(rows) * self.has_states
        used = [slot for slot in (*set(uses[::5]), *uses[2::5], *uses[3::5]) if slot]
        assert len(used) == len(set(used)), "no slot is read and written, or written twice, in a step"
        num_drafts = ints(step.num_drafts) or [0] * len(rows)
        for index, (slot_index, start_position, num_tokens, is_sampling) in enumerate(rows):
            slot, least, num_before = self.slots[slot_index], start_position, len(token_ids)
            if slot_index in self.late:
                if following[index] or start_position + num_tokens > len(slot.token_ids):
                    counts.append(0)
                    num_drafts[index] = 0
                    continue
                self.late.discard(slot_index)
            if following[index]:
                assert (is_sampling, num_tokens) == (1, 1), "only rows of one token begin at an unknown position"
                start_position = len(slot.token_ids) - 1
                assert start_position >= least, "a row begins at the least where it is said to"
            if is_sampling and len(slot.token_ids) >= slot.start.max_total_tokens:
                assert following[index], "a sequence that has all its tokens gets no row that begins where it is known to"
                counts.append(0)
                num_drafts[index] = 0
                continue
            use = uses[5 * index : 5 * index + 5]
            values = self._begin_states(slot, start_position, use, is_following=bool(following[index])) if use else {}
            prompt_logprobs = self._compute(slot, start_position, num_tokens)
            if prompt_logprobs is not None:
                prompts[index] = prompt_logprobs
            if is_sampling:
                assert len(slot.token_ids) == start_position + num_tokens, "sampling appends"
                chance = random.Random(step.step_id << 16 | slot_index)  # the same on all ranks
                if chance.random() < self.simulation.late_share:
                    self.late.add(slot_index)
                    counts.append(0)
                    num_drafts[index] = 0
                    self._write_states(slot, start_position, num_tokens, values, use)
                    continue
                num_drafts[index] = max(0, min(num_drafts[index], slot.start.max_total_tokens - len(slot.token_ids) - 1))
                for token_id, value in self._verify(slot, num_drafts[index], chance):
                    if slot.start.sampling.num_logprobs > 0:
                        tops[len(token_ids)] = (array("i", [token_id]).tobytes(), array("f", [value]).tobytes())
                    token_ids.append(token_id)
                    logprobs.append(value)
            counts.append(len(token_ids) - num_before)
            self._write_states(slot, start_position, num_tokens, values, use)
        return StepResult(
            step.step_id,
            self.index,
            self.version,
            array("i", token_ids).tobytes(),
            array("f", logprobs).tobytes(),
            array("i", [1] * len(token_ids)).tobytes(),
            array("i", counts).tobytes(),
            tops,
            prompts,
            sum(row[2] for row in rows),
            step.dispatch_ns,
            time.monotonic_ns(),
            encoded=encoded,
            num_drafts=array("i", num_drafts).tobytes(),
            num_wanted=array("i", [self._num_wanted(step.step_id, row[0]) for row in rows]).tobytes(),
            num_wanted_by_new_requests=self.simulation.num_wanted_drafts,
        )

    def _num_wanted(self, step_id: int, slot_index: int) -> int:
        chance = random.Random(step_id << 16 | slot_index | 1 << 15)  # the same on all ranks
        return self.simulation.num_wanted_drafts if chance.random() < self.simulation.wanting_share else 0

    def _begin_states(self, slot: Slot, start: int, use: list[int], *, is_following: bool) -> dict[int, int]:
        """Read a row's state and replay what is logged; return the numbers after so many tokens."""
        read, position, _, _, _ = use
        slot.inputs = []
        if self.index:  # its tokens are not used, and steps that it had not run when it died are lost
            slot.recurrent = {start - 1: 0}
            return {start: 0}
        state = self.simulation.states[self.index, read] if read else BEGIN
        assert state.position == position or (is_following and state.position >= position), "the state is the one it should be"
        values = {state.position: state.value}
        for offset, value in enumerate(state.log[: start - state.position]):
            values[state.position + offset + 1] = mix(values[state.position + offset], value, self.path)
        assert start in values, f"a row at {start} reads a state at {state.position}, and {len(state.log)} logged rows"
        slot.recurrent = {start - 1: values[start]}
        return values

    def _write_states(self, slot: Slot, start: int, num_tokens: int, values: dict[int, int], use: list[int]) -> None:
        """Write the state after a row's certain positions, and log its others."""
        if not use:
            return
        _, _, write, keep, keep_at = use
        position = min(values)
        values |= {place + 1: value for place, value in slot.recurrent.items()}
        num_certain = max(0, num_tokens - self.simulation.config.speculative_config.num_overlap)
        end = start + num_certain
        self.simulation.states[self.index, write] = EchoState(end, values[end], tuple(slot.inputs[num_certain:]))
        if keep and position < keep_at <= end:
            self.simulation.states[self.index, keep] = EchoState(keep_at, values[keep_at], ())

    def _verify(self, slot: Slot, num_drafts: int, chance: random.Random) -> list[tuple[int, float]]:
        """Return the token after the slot's last one, and the accepted tokens of its drafts. Some drafts are right, and all are
        computed first, as in a rank."""
        first = len(slot.token_ids)
        num_right = chance.randint(0, num_drafts)
        found: list[tuple[int, float]] = []
        for place in range(1 + num_drafts):
            kv = self._kv(slot, len(slot.token_ids) - 1)
            token_id = draw(kv, slot.start.sampling.seed)
            if place <= num_right:
                found.append((token_id, logprob(kv, token_id)))
            if place < num_drafts:
                slot.token_ids.append(token_id if place < num_right else (token_id + 1) % VOCAB_SIZE)
                self._compute(slot, len(slot.token_ids) - 1, 1)
        slot.token_ids[first:] = [token_id for token_id, _ in found]
        return found

    def _missing(self, rows: list[tuple[int, int, int, int]]) -> dict[bytes, str]:
        """Return the units that the rows read and that are not where they should be."""
        missing: dict[bytes, str] = {}
        for slot_index, start, num_tokens, _ in rows:
            slot, end = self.slots[slot_index], start + num_tokens
            assert all(slot.span_ends.get(position, 0) <= end for position in range(start, end)), "what is seen is computed"
            for unit, first_row, unit_hash in zip(slot.start.units, slot.unit_rows, slot.start.unit_hashes, strict=True):
                if unit.start < end and start < unit.start + unit.num_tokens:
                    assert first_row >= 0, "the scheduler says where the features are"
                    cause = self.encoder.missing(unit_hash, first_row, unit.num_tokens, self.version)
                    missing |= {unit_hash: cause} if cause else {}
        return missing

    def _kv(self, slot: Slot, position: int) -> int:
        recurrent = [slot.recurrent[position]] if self.has_states else []
        return joined([*(self._kv_in(table, position) for table in slot.tables), *recurrent])

    def _kv_in(self, table: list[int], position: int) -> int:
        size = self.simulation.config.block_size
        place = self.index, table[position // size], position % size
        assert place[1], f"position {position} is read after its block was freed"
        if self.index:  # its tokens are not used, and steps that it had not run when it died are lost
            return self.simulation.arena.get(place, 0)
        return self.simulation.arena[place]

    def _compute(self, slot: Slot, start: int, num_tokens: int) -> PromptLogprobs | None:
        size = self.simulation.config.block_size
        values: list[float] = []
        for position in range(start, start + num_tokens):
            for table, window in zip(slot.tables, self.windows, strict=True):
                of_layer = next_kv(partial(self._kv_in, table), position, slot.value(position), window, self.path)
                self.simulation.arena[self.index, table[position // size], position % size] = of_layer
            if self.has_states:
                slot.recurrent[position] = mix(slot.recurrent[position - 1], slot.value(position), self.path)
                slot.inputs.append(slot.value(position))
            kv = self._kv(slot, position)
            if position + 1 < slot.start.num_prompt_tokens:
                values.append(logprob(kv, slot.token_ids[position + 1]))
        if not slot.start.wants_prompt_logprobs or not values:
            return None
        ranks = array("i", [1] * len(values)).tobytes()
        return PromptLogprobs(start + 1, 0, array("f", values).tobytes(), ranks, b"", b"")


@dataclass
class Stream:
    """A tokenizer's outputs for one request."""

    request: SequenceRequest
    token_ids: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    admissions: list[Output] = field(default_factory=list)  # those that only tell of the prompt
    finish_reason: str = ""
    rejected: Rejected | None = None

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return [entry for output in self.outputs for entry in output.prompt_logprobs]

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason) or self.rejected is not None


class Simulation:
    """The whole simulation: rings, the scheduler's loop, the ranks, and the tokenizers' ends. With several replicas it is the
    first one."""

    def __init__(self, directory: Path, config: EngineConfig, ring_bytes: int, broadcast_bytes: int) -> None:
        self.config = config
        self.run = Run(config.run_id, directory)
        tokenizers = [f"tokenizer{index}" for index in range(config.tokenizer_processes)]
        workers = [f"worker{index}" for index in range(config.num_ranks)]
        media = [f"media{index}" for index in range(config.media_processes)]
        schedulers, caches = (names_of(role, config.data_parallel_size) for role in (SCHEDULER, CACHE))
        self.name = schedulers[0]
        names = ["api0", "api1", *media, *tokenizers, *schedulers, *caches, *workers]
        sizes = RingSizes(dict.fromkeys(names, ring_bytes), broadcast_bytes)
        self.segments = RunSegments(config.run_id, names, sizes, 0, max_drafts=config.speculative_config.max_drafts)
        for name in names:
            self.begin_epoch(name, 1)
        self.arena: dict[tuple[int, int, int], int] = {}  # rank, block, place in it -> KV
        self.states: dict[tuple[int, int], EchoState] = {}  # by rank and slot
        self.caches_outlive_ranks = True
        self.late_share = 0.0  # of rows that get no token, since a mask is late
        self.rank_records = 100  # most that a rank reads in a turn; 1: the next step is sent while one is in flight
        self.num_wanted_drafts = 0
        self.wanting_share = 1.0  # of the rows that want drafts, if any is wanted
        self.features = FeatureArena()
        self.media = [EchoMedia(self, index) for index in range(config.media_processes)]
        for name in media:
            self.segments.counters.actor(name).set_state(State.READY)
        self.streams: dict[str, Stream] = {}
        self.replies: dict[str, Reply] = {}
        self.paths = {1: MODEL}  # of each version that a rank was ever told to load
        self.cache_messages: list[Message] = []
        self.is_reading = dict.fromkeys(tokenizers, True)
        self._num_arrivals = 0
        self._num_commands = 0
        self._events = EventChannel()
        self._mailboxes = {name: Mailbox.attach(config.run_id, name, 1) for name in [*tokenizers, caches[0]]}
        self._senders = {
            name: MailboxSender.attach(config.run_id, self.name, name, 1) for name in [*tokenizers, caches[0], SUPERVISOR]
        }
        self.run.write_weights(WeightsRecord.of_start(config), self.name)
        self.start_scheduler(1)
        self.ranks = [EchoRank(self, index, 1) for index in range(config.tensor_parallel_size)]

    @property
    def rank(self) -> EchoRank:
        """The first rank, worker0."""
        return self.ranks[0]

    # ------------------------------------------------------------------------------------------------ lives and deaths

    def begin_epoch(self, name: str, epoch: int) -> None:
        self.segments.counters.actor(name).begin_epoch(epoch, time.monotonic_ns())

    def start_scheduler(self, epoch: int) -> None:
        self.begin_epoch(self.name, epoch)
        self.scheduler_epoch = epoch
        self.context = ActorContext(self.run, self.config, self.name, epoch, events_fd=self._events.sender)
        self.scheduler = SchedulerActor(self.context)
        self.loop = ActorLoop(self.scheduler)
        self.scheduler.on_start()
        self.context.row.set_state(State.READY)

    def restart_scheduler(self) -> None:
        """Kill the scheduler and start the next one; the api submits everything open again, and the ranks send a hello."""
        self._collect_events()
        self.context.close()
        self.start_scheduler(self.scheduler_epoch + 1)
        for rank in self.ranks:
            rank.say_hello()
        self.resubmit_open()

    def resubmit_open(self) -> None:
        for stream in list(self.streams.values()):
            if not stream.is_over:
                self.resubmit(stream)

    def restart_rank(self, answers: bool = False, weights: tuple[str, int] | None = None, files: str = "") -> None:
        """Kill the rank in the middle of its steps and start the next one, which loads the weights in use, or has only
        `weights`."""
        self.rank.turn(answers=answers)
        self.kill_rank()
        self.revive_rank(weights=weights, files=files)

    def kill_rank(self, index: int = 0) -> None:
        self.ranks[index].close()
        self.segments.evict(f"worker{index}")

    def revive_rank(self, index: int = 0, weights: tuple[str, int] | None = None, files: str = "") -> None:
        if not self.caches_outlive_ranks:
            self.arena = {place: value for place, value in self.arena.items() if place[0] != index}
            self.states = {place: value for place, value in self.states.items() if place[0] != index}
        epoch = self.ranks[index].epoch + 1
        self.begin_epoch(f"worker{index}", epoch)
        self.ranks[index] = EchoRank(self, index, epoch, weights, files)

    def restart_media(self, index: int = 0) -> None:
        """Kill a media process with everything that it held, and start the next one."""
        self.media[index].close()
        epoch = self.media[index].epoch + 1
        self.begin_epoch(f"media{index}", epoch)
        self.media[index] = EchoMedia(self, index, epoch)
        self.segments.counters.actor(f"media{index}").set_state(State.READY)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for media in self.media:
            media.close()
        self.context.close()
        for end in (*self._mailboxes.values(), *self._senders.values()):
            end.close()
        self._events.close()
        self.segments.close()
        unlink_segments(self.config.run_id)

    # ---------------------------------------------------------------------------------------------- what the api sends

    def submit(self, prompt: list[int], request_id: str = "", tokenizer: str = "tokenizer0", **options: Any) -> Stream:
        """Submit a new request. `options`: fields of Request, and of its sampling parameters."""
        self._num_arrivals += 1
        request = sequence_request(
            array("i", prompt).tobytes(),
            request_id or f"r{self._num_arrivals}-0",
            **({"max_tokens": 8, "arrival_ns": self._num_arrivals, "tokenizer": tokenizer} | options),
        )
        stream = self.streams[request.own.request_id] = Stream(request)
        self.send(tokenizer, request_message(request))
        return stream

    def resubmit(self, stream: Stream) -> None:
        stream.request = with_own(
            stream.request,
            attempt=stream.request.own.attempt + 1,
            resume_token_ids=array("i", stream.token_ids).tobytes(),
            num_scored_prompt_tokens=len(stream.prompt_logprobs),
        )
        self.send(stream.request.tokenizer, request_message(stream.request))

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        self.send(stream.request.tokenizer, Abort(stream.request.own.request_id, stream.request.own.attempt, reason))

    def send(self, sender: str, message: Message) -> None:
        self.run_until(lambda: self._senders[sender].try_send(encode(message)), "room in the scheduler's mailbox")

    def order(self, order: Order) -> str:
        """Send a command; return its id."""
        self._num_commands += 1
        command_id = f"c{self._num_commands}"
        self._senders["supervisor"].try_send(encode(Command(command_id, order, self.scheduler_epoch)))
        return command_id

    def ask(self, order: Order) -> Reply:
        """Send a command and run until it is answered."""
        command_id = self.order(order)
        self.run_until(lambda: command_id in self.replies, f"a reply to {order}")
        return self.replies[command_id]

    # --------------------------------------------------------------------------------------------------------- running

    def turn(self, rank_records: int | None = None) -> int:
        """Run one turn of each actor."""
        most = self.rank_records if rank_records is None else rank_records
        num_done = self.loop.turn() + sum(rank.turn(most) for rank in self.ranks)
        num_done += sum(media.turn() for media in self.media)
        return num_done + self.collect()

    def collect(self) -> int:
        """Read what the scheduler sent to the tokenizers, the cache actor and the supervisor."""
        num_done = 0
        for name, mailbox in self._mailboxes.items():
            if self.is_reading.get(name, True):
                for _, payload in mailbox.receive():
                    num_done += 1
                    self._take(decode(payload))
        return num_done + self._collect_events()

    def _collect_events(self) -> int:
        events = self._events.received()
        for event in events:
            self._take_event(event)
        return len(events)

    def run_until(self, predicate: Callable[[], object], what: str, timeout_s: float = WATCHDOG_S) -> None:
        """Run turns until `predicate` holds."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            self.turn()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s} s: {what}")

    def finish(self, *streams: Stream) -> None:
        """Run until these (none: all) streams are over and nothing is in flight."""
        wanted = streams or tuple(self.streams.values())
        self.run_until(lambda: all(stream.is_over for stream in wanted), "the ends of all streams")
        self.run_until(lambda: self.scheduler.dispatcher.num_in_flight == 0 or bool(streams), "no step in flight")

    def start(self, *streams: Stream, num_tokens: int = 1) -> None:
        """Run until each of these has `num_tokens` tokens."""
        self.run_until(lambda: all(len(stream.token_ids) >= num_tokens for stream in streams), f"{num_tokens} tokens each")

    def metric(self, name: str, **labels: str) -> float:
        return float(self.segments.counters.counter(name, self.name, **labels).value)

    def check(self, *streams: Stream, path: str = MODEL) -> None:
        """Check that these (none: all) streams ended with the result of an undisturbed run."""
        for stream in streams or self.streams.values():
            sampling = stream.request.sampling
            expected = expected_tokens(expected_values(stream.request), sampling, path, windows_of(self.config))
            assert stream.token_ids == expected, stream.request.own.request_id
            is_stopped = bool(expected) and expected[-1] in sampling.stop_token_ids and len(expected) > sampling.min_tokens
            assert stream.finish_reason == ("stop" if is_stopped else "length")

    def check_idle(self) -> None:
        """Check that nothing is held when nothing runs."""
        batch = self.scheduler.batch
        assert (len(batch.running), batch.num_waiting, batch.num_leaving) == (0, 0, 0)
        assert batch.pool.num_free == self.config.num_kv_pages
        if batch.pool.states is not None:
            assert batch.pool.states.num_used == 0
            assert batch.pool.states.num_free == self.config.num_states
        assert not batch.sequences
        assert not batch.leaders
        assert batch.num_with_media == 0
        if self.scheduler.encoder is not None:
            assert self.scheduler.encoder.is_idle
            assert all(unit.can_go for unit in self.scheduler.encoder.cache)
            assert not any(media.held for media in self.media), "pixels are given back"
        assert (self.metric("num_requests_running"), self.metric("num_requests_waiting")) == (0, 0)

    def _take(self, message: Message) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    stream = self.streams[output.request_id]
                    if output.attempt == stream.request.own.attempt:
                        assert not stream.is_over, f"{output.request_id} goes on after its end"
                        stream.token_ids += output.token_ids
                        is_admission = not (output.token_ids or output.prompt_logprobs or output.finish_reason)
                        (stream.admissions if is_admission else stream.outputs).append(output)
                        stream.finish_reason = output.finish_reason
                        assert len(output.logprobs) == len(output.token_ids)
            case Rejected(request_id):
                self.streams[request_id].rejected = message
            case _:
                self.cache_messages.append(message)

    def _take_event(self, event: Control) -> None:
        match event:
            case Reply(command_id):
                self.replies[command_id] = event


def small_config(directory: Path, **options: Any) -> EngineConfig:
    """Return the configuration of an engine for tokens 0 to 60, with blocks of 4."""
    defaults: dict[str, Any] = {
        "model": MODEL,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_kv_blocks": 128,
        "max_logprobs": 19,  # the smallest rings take no more
        "run_id": new_run_id(),
        "run_dir": str(directory),
    }
    return engine_config(**(defaults | options))


@contextmanager
def simulate(
    directory: Path, ring_bytes: int = 1 << 17, broadcast_bytes: int = 1 << 19, **options: Any
) -> Iterator[Simulation]:
    """Run a simulation of `small_config` with these options; remove its segments afterwards."""
    simulation = Simulation(directory, small_config(directory, **options), ring_bytes, broadcast_bytes)
    try:
        yield simulation
    finally:
        simulation.close()
