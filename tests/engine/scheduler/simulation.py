"""A scheduler on real rings in one process, with the actors around it played by the test.

`EchoRank` follows the worker's protocol in full, but its "model" is arithmetic: the KV of a position is a number mixed from
the KV of the position before and the token, kept in an arena that is addressed through the block table, as a real one is. The
next token is drawn from the last KV. So a wrong block, a stale one or one shared by mistake changes the tokens from there on,
and `expected_tokens` says what they must be.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.config import EngineConfig
from engine.messages import (
    Abort,
    ClearWeights,
    Command,
    Control,
    Hello,
    LoadWeights,
    Message,
    Order,
    Output,
    Outputs,
    PromptLogprobs,
    Rejected,
    Reply,
    Request,
    Requests,
    SamplingParams,
    SlotStart,
    Step,
    StepResult,
    WeightsChanged,
    WeightsInUse,
    decode,
    decode_control,
    encode,
)
from engine.process.actor import ActorLoop
from engine.process.context import ActorContext
from engine.process.run_directory import Run, WeightsRecord, new_run_id
from engine.process.segments import RunSegments, unlink_segments
from engine.process.topology import RingSizes
from engine.scheduler.actor import SchedulerActor
from shm.broadcast import BroadcastReader
from shm.counters import State
from shm.mailbox import Mailbox, MailboxSender
from tests.waiting import WATCHDOG_S

VOCAB_SIZE = 61
MASK = (1 << 64) - 1
MODEL = "/weights/a"


def ints(data: bytes) -> list[int]:
    return array("i", data).tolist()


def mix(kv: int, token_id: int, path: str) -> int:
    """The KV of a token after that of the one before."""
    return (kv * 6364136223846793005 + (token_id + 1) * 1442695040888963407 + sum(path.encode())) & MASK


def draw(kv: int, seed: int) -> int:
    """The token after a position with this KV."""
    mixed = ((kv ^ (kv >> 29)) * 0x9E3779B97F4A7C15 + seed * 0xBF58476D1CE4E5B9) & MASK
    return (mixed >> 32) % VOCAB_SIZE


def logprob(kv: int, token_id: int) -> float:
    return -float((kv >> 40 ^ token_id) % 1000) / 64


def expected_tokens(prompt: list[int], sampling: SamplingParams, path: str = MODEL) -> list[int]:
    """What an undisturbed run answers."""
    kv = 0
    for token_id in prompt:
        kv = mix(kv, token_id, path)
    outputs: list[int] = []
    while len(outputs) < sampling.max_tokens:
        outputs.append(draw(kv, sampling.seed))
        if outputs[-1] in sampling.stop_token_ids and len(outputs) > sampling.min_tokens:
            break
        kv = mix(kv, outputs[-1], path)
    return outputs


@dataclass
class Slot:
    token_ids: list[int]
    block_ids: list[int]
    start: SlotStart


class EchoRank:
    """worker0: a reader of the broadcast ring. `turn` runs what has come, at most `max_steps` steps."""

    def __init__(self, simulation: Simulation, epoch: int, path: str, version: int) -> None:
        run_id = simulation.config.run_id
        self.simulation = simulation
        self.path, self.version = path, version
        self.slots: dict[int, Slot] = {}
        self.steps: list[Step] = []
        self.pending: list[bytes] = []
        self.refuses_loads = ""
        self.hangs_on_loads = False
        self._reader = BroadcastReader.attach(run_id, "scheduler", 0, epoch)
        self._sender = MailboxSender.attach(run_id, "scheduler", "worker0", epoch)
        self.epoch = epoch
        self.say_hello()

    def say_hello(self) -> None:
        self.send(Hello("worker0", self.epoch, self.version, self.path))

    def send(self, message: Message) -> None:
        assert self._sender.try_send(encode(message))

    def turn(self, max_records: int = 100, answers: bool = True) -> int:
        """Run what has come. `answers=False`: die before the results leave."""
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
                case LoadWeights(command_id, path, version, ranks):
                    if not ranks or 0 in ranks:
                        if not self.refuses_loads:
                            self.path, self.version = path, version
                        self.send(WeightsChanged(command_id, 0, self.version, self.path, self.refuses_loads))
                case ClearWeights(command_id):
                    self.version = 0
                    self.send(WeightsChanged(command_id, 0, 0, self.path))
        return num_done

    def close(self) -> None:
        self._reader.close()
        self._sender.close()

    def _run(self, step: Step) -> StepResult:
        assert self.version, "a step without weights"
        self.steps.append(step)
        for start in step.starts:
            self.slots[start.slot] = Slot(ints(start.token_ids), ints(start.block_ids), start)
        growth = zip(ints(step.block_slots), ints(step.block_indexes), ints(step.block_ids), strict=True)
        for slot, index, block_id in growth:
            table = self.slots[slot].block_ids
            assert index == len(table), "block tables grow at their end"
            table.append(block_id)
        rows = list(zip(ints(step.slots), ints(step.start), ints(step.num_tokens), step.is_sampling, strict=True))
        assert [row[0] for row in rows] == sorted({row[0] for row in rows}), "B4: rows in slot order"
        assert sum(row[2] for row in rows) <= self.simulation.config.max_num_batched_tokens, "B8: the budget"
        token_ids, logprobs, tops, prompts = [], [], {}, {}
        for index, (slot_index, start_position, num_tokens, is_sampling) in enumerate(rows):
            slot = self.slots[slot_index]
            prompt_logprobs = self._compute(slot, start_position, num_tokens)
            if prompt_logprobs is not None:
                prompts[index] = prompt_logprobs
            token_id, value = -1, 0.0
            if is_sampling:
                end = start_position + num_tokens
                kv = self._kv(slot, end - 1)
                token_id = draw(kv, slot.start.sampling.seed)
                value = logprob(kv, token_id)
                assert len(slot.token_ids) == end, "sampling appends"
                slot.token_ids.append(token_id)
                if slot.start.sampling.num_logprobs > 0:
                    tops[index] = (array("i", [token_id]).tobytes(), array("f", [value]).tobytes())
            token_ids.append(token_id)
            logprobs.append(value)
        return StepResult(
            step.step_id,
            0,
            self.version,
            array("i", token_ids).tobytes(),
            array("f", logprobs).tobytes(),
            array("i", [1] * len(rows)).tobytes(),
            tops,
            prompts,
            sum(row[2] for row in rows),
            step.dispatch_ns,
            time.monotonic_ns(),
        )

    def _kv(self, slot: Slot, position: int) -> int:
        if position < 0:
            return 0
        size = self.simulation.config.block_size
        return self.simulation.arena[slot.block_ids[position // size], position % size]

    def _compute(self, slot: Slot, start: int, num_tokens: int) -> PromptLogprobs | None:
        size = self.simulation.config.block_size
        values: list[float] = []
        for position in range(start, start + num_tokens):
            kv = mix(self._kv(slot, position - 1), slot.token_ids[position], self.path)
            self.simulation.arena[slot.block_ids[position // size], position % size] = kv
            if position + 1 < slot.start.num_prompt_tokens:
                values.append(logprob(kv, slot.token_ids[position + 1]))
        if slot.start.sampling.num_prompt_logprobs < 0 or slot.start.has_prompt_logprobs or not values:
            return None
        ranks = array("i", [1] * len(values)).tobytes()
        return PromptLogprobs(start + 1, 0, array("f", values).tobytes(), ranks, b"", b"")


@dataclass
class Stream:
    """What a tokenizer has got for one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    admissions: list[Output] = field(default_factory=list)  # those that only tell of the prompt
    finish_reason: str = ""
    rejected: Rejected | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason) or self.rejected is not None


class Simulation:
    """The whole: rings, the scheduler's loop, a rank, and the tokenizers' ends."""

    def __init__(self, directory: Path, config: EngineConfig, ring_bytes: int, broadcast_bytes: int) -> None:
        self.config = config
        self.run = Run(config.run_id, directory)
        tokenizers = [f"tokenizer{index}" for index in range(config.tokenizer_processes)]
        names = ["api0", "api1", *tokenizers, "scheduler", "cache", "worker0"]
        sizes = RingSizes(dict.fromkeys(names, ring_bytes), broadcast_bytes)
        self.segments = RunSegments(config.run_id, names, sizes, 1, 0)
        for name in names:
            self.begin_epoch(name, 1)
        self.arena: dict[tuple[int, int], int] = {}
        self.streams: dict[str, Stream] = {}
        self.replies: dict[str, Reply] = {}
        self.weights_in_use: list[WeightsInUse] = []
        self.cache_messages: list[Message] = []
        self.is_reading = dict.fromkeys(tokenizers, True)
        self._num_arrivals = 0
        self._num_commands = 0
        self._zmq = zmq.Context()
        self._events = self._zmq.socket(zmq.PULL)
        self._events.bind(self.run.events_endpoint)
        self._mailboxes = {name: Mailbox.attach(config.run_id, name, 1) for name in [*tokenizers, "cache"]}
        self._senders = {
            name: MailboxSender.attach(config.run_id, "scheduler", name, 1) for name in [*tokenizers, "cache", "supervisor"]
        }
        self.start_scheduler(1)
        self.rank = EchoRank(self, 1, MODEL, 1)

    # ------------------------------------------------------------------------------------------------ lives and deaths

    def begin_epoch(self, name: str, epoch: int) -> None:
        self.segments.counters.actor(name).begin_epoch(epoch, time.monotonic_ns())

    def start_scheduler(self, epoch: int) -> None:
        self.begin_epoch("scheduler", epoch)
        self.scheduler_epoch = epoch
        self.context = ActorContext(self.run, self.config, "scheduler", epoch)
        self.scheduler = SchedulerActor(self.context)
        self.loop = ActorLoop(self.scheduler)
        self.scheduler.on_start()
        self.context.row.set_state(State.READY)

    def restart_scheduler(self) -> None:
        """It dies; the edge submits everything open again, and the rank greets the new one."""
        self.context.close()
        self.start_scheduler(self.scheduler_epoch + 1)
        self.rank.say_hello()
        for stream in list(self.streams.values()):
            if not stream.is_over:
                self.resubmit(stream)

    def restart_rank(self, answers: bool = False) -> None:
        """It dies in the middle of the steps that it has; the next one loads what is in use."""
        self.rank.turn(answers=answers)
        self.kill_rank()
        self.revive_rank()

    def kill_rank(self) -> None:
        self.rank.close()
        self.segments.broadcast.evict(0)

    def revive_rank(self) -> None:
        record = self.run.weights_in_use() or WeightsRecord(MODEL, 1)
        epoch = self.rank.epoch + 1
        self.begin_epoch("worker0", epoch)
        self.rank = EchoRank(self, epoch, record.path, record.version)

    def close(self) -> None:
        self.rank.close()
        self.context.close()
        for end in (*self._mailboxes.values(), *self._senders.values()):
            end.close()
        self._events.close(0)
        self._zmq.term()
        self.segments.close()
        unlink_segments(self.config.run_id)

    # ---------------------------------------------------------------------------------------------- what the edge sends

    def submit(self, prompt: list[int], request_id: str = "", tokenizer: str = "tokenizer0", **options: Any) -> Stream:
        """A new request. `options`: fields of Request, and of its sampling parameters."""
        self._num_arrivals += 1
        names = {field.name for field in msgspec.structs.fields(SamplingParams)}
        sampling = SamplingParams(**({"max_tokens": 8} | {name: options.pop(name) for name in list(options) if name in names}))
        request = Request(
            request_id or f"r{self._num_arrivals}-0",
            options.pop("api", "api0"),
            1,
            tokenizer,
            0,
            array("i", prompt).tobytes(),
            b"",
            sampling,
            arrival_ns=self._num_arrivals,
            **options,
        )
        stream = self.streams[request.request_id] = Stream(request)
        self.send(tokenizer, Requests.of([request]))
        return stream

    def resubmit(self, stream: Stream) -> None:
        stream.request = msgspec.structs.replace(
            stream.request,
            attempt=stream.request.attempt + 1,
            resume_token_ids=array("i", stream.token_ids).tobytes(),
            has_prompt_logprobs=any(output.prompt_logprobs is not None for output in stream.outputs),
        )
        self.send(stream.request.tokenizer, Requests.of([stream.request]))

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        self.send(stream.request.tokenizer, Abort(stream.request.request_id, stream.request.attempt, reason))

    def send(self, sender: str, message: Message) -> None:
        self.run_until(lambda: self._senders[sender].try_send(encode(message)), "room in the scheduler's mailbox")

    def order(self, order: Order) -> str:
        """Send an order; its command id."""
        self._num_commands += 1
        command_id = f"c{self._num_commands}"
        self._senders["supervisor"].try_send(encode(Command(command_id, order, self.scheduler_epoch)))
        return command_id

    def ask(self, order: Order) -> Reply:
        """Send an order and run until it is answered."""
        command_id = self.order(order)
        self.run_until(lambda: command_id in self.replies, f"a reply to {order}")
        return self.replies[command_id]

    # -------------------------------------------------------------------------------------------------------- running

    def turn(self, rank_records: int = 100) -> int:
        """Everybody once."""
        num_done = self.loop.turn() + self.rank.turn(rank_records)
        return num_done + self.collect()

    def collect(self) -> int:
        """Read what the scheduler sent to the tokenizers, the cache messenger and the supervisor."""
        num_done = 0
        for name, mailbox in self._mailboxes.items():
            if self.is_reading.get(name, True):
                for _, payload in mailbox.receive():
                    num_done += 1
                    self._take(decode(payload))
        while self._events.poll(0):
            self._take_event(decode_control(self._events.recv()))
            num_done += 1
        return num_done

    def run_until(self, predicate: Callable[[], object], what: str, timeout_s: float = WATCHDOG_S) -> None:
        """Turns until `predicate` holds."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            self.turn()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s} s: {what}")

    def finish(self, *streams: Stream) -> None:
        """Run until these (none: all) streams are over and nothing is in flight."""
        wanted = streams or tuple(self.streams.values())
        self.run_until(lambda: all(stream.is_over for stream in wanted), "the ends of all streams")
        self.run_until(lambda: self.scheduler.dispatcher.num_in_flight == 0 or not streams, "no step in flight")

    def start(self, *streams: Stream, num_tokens: int = 1) -> None:
        """Run until each of these has `num_tokens` tokens."""
        self.run_until(lambda: all(len(stream.token_ids) >= num_tokens for stream in streams), f"{num_tokens} tokens each")

    def metric(self, name: str) -> float:
        return float(self.segments.counters.counter(name, "scheduler").value)

    def check(self, *streams: Stream, path: str = MODEL) -> None:
        """These (none: all) streams ended with what an undisturbed run gives."""
        for stream in streams or self.streams.values():
            sampling = stream.request.sampling
            expected = expected_tokens(ints(stream.request.prompt_token_ids), sampling, path)
            assert stream.token_ids == expected, stream.request.request_id
            is_stopped = bool(expected) and expected[-1] in sampling.stop_token_ids and len(expected) > sampling.min_tokens
            assert stream.finish_reason == ("stop" if is_stopped else "length")

    def check_idle(self) -> None:
        """F6 and the books: nothing is held when nothing runs."""
        batch = self.scheduler.batch
        assert (len(batch.running), batch.num_waiting, batch.num_leaving) == (0, 0, 0)
        assert batch.pool.num_free == self.config.num_kv_blocks
        assert not batch.sequences
        assert not batch.leaders
        assert (self.metric("num_requests_running"), self.metric("num_requests_waiting")) == (0, 0)

    def _take(self, message: Message) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    stream = self.streams[output.request_id]
                    if output.attempt == stream.request.attempt:
                        assert not stream.is_over, f"{output.request_id} goes on after its end"
                        stream.token_ids += output.token_ids
                        is_admission = not output.token_ids and not output.finish_reason
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
            case WeightsInUse(path, version):
                self.weights_in_use.append(event)
                self.run.write_weights_in_use(WeightsRecord(path, version))


def small_config(directory: Path, **options: Any) -> EngineConfig:
    """An engine for tokens 0 to 60, with blocks of 4."""
    defaults: dict[str, Any] = {
        "model": MODEL,
        "served_model_name": ("echo",),
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_kv_blocks": 128,
        "kv_cache_bytes": 0,
        "run_id": new_run_id(),
        "run_dir": str(directory),
    }
    return EngineConfig(**(defaults | options))


@contextmanager
def simulate(
    directory: Path, ring_bytes: int = 1 << 17, broadcast_bytes: int = 1 << 19, **options: Any
) -> Iterator[Simulation]:
    """A simulation of `small_config` with these options; its segments are gone afterwards."""
    simulation = Simulation(directory, small_config(directory, **options), ring_bytes, broadcast_bytes)
    try:
        yield simulation
    finally:
        simulation.close()
