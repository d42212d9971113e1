"""The worker actor on real rings, turn by turn in one process; the test is the scheduler and the supervisor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np
import pytest

from engine.checkpoint.comm_spec import comm_bytes
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.record import ModelRecord
from engine.errors import CheckpointError
from engine.messages import (
    ActorState,
    ClearWeights,
    Hello,
    LoadWeights,
    Message,
    SamplingParams,
    SlotStart,
    Step,
    StepResult,
    WeightsChanged,
    WeightsState,
    decode,
    encode,
)
from engine.process.actor import ActorLoop
from engine.process.context import ActorContext
from engine.process.events import EventChannel
from engine.process.run_directory import Run, WeightsRecord, new_run_id
from engine.process.segments import RunSegments, unlink_segments
from shm.counters import State
from shm.mailbox import Mailbox
from tests.configurations import engine_config
from tests.waiting import wait_until
from tests.workers.checkpoints import TINY, drawn_tensors, write_checkpoint, write_config, write_safetensors
from tests.workers.rank_group.calls import last_call
from tests.workers.serving import ServedSequence, Serving, int32, make_runner
from workers.actor import WorkerActor

NAMES = ("scheduler", "worker0")
PROMPT = [5, 9, 3, 30, 22, 8, 17]
NUM_BLOCKS = 16


class Engine:
    """A run of a scheduler (this object) and a worker, without processes."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.model = directory / "model"
        shape = write_checkpoint(self.model, TINY)
        num_ranks = int(options.get("tensor_parallel_size", 1))
        self.config = engine_config(
            model=str(self.model),
            max_model_len=64,
            max_num_seqs=4,
            num_kv_blocks=NUM_BLOCKS,
            kv_cache_bytes=KVCacheSpec.of(shape, 16, "float32").arena_bytes(NUM_BLOCKS),
            run_id=new_run_id(),
            run_dir=str(directory),
            comm_bytes=comm_bytes(shape, num_ranks, num_ranks, 512, 32, shares_experts=False),
            **options,
        )
        self.run = Run(self.config.run_id, directory)
        self.run.write(self.run.model_path, ModelRecord.read(self.model).encode())
        self.run.write_weights(WeightsRecord.of_start(self.config))
        names = (*NAMES, *(f"worker{rank}" for rank in range(1, self.config.num_ranks)))
        self.segments = RunSegments.of(self.config, names)
        self.events = EventChannel()
        for name in names:
            self.segments.counters.actor(name).begin_epoch(1, 0)
        self.mailbox = Mailbox.attach(self.config.run_id, "scheduler", 1)
        self.workers: list[WorkerActor] = []

    def worker(self, epoch: int = 1) -> WorkerActor:
        """Return a started worker; an earlier one counts as dead."""
        comm = self.segments.comm_of("worker0")
        fds = self.segments.arenas[0].fd, -1 if comm is None else comm.fd, None, self.events.sender
        context = ActorContext(self.run, self.config, "worker0", epoch, *fds)
        worker = WorkerActor(context)
        self.workers.append(worker)
        worker.on_start()
        return worker

    def use(self, path: Path, version: int, contents: str = "") -> None:
        """Set the weights that a worker has to load."""
        weights, known = (str(path), version), {version: contents} if contents else {}
        self.run.write_weights(WeightsRecord(*weights, version, WeightsState.NORMAL, (weights,), known))

    def keep_packed(self, directory: Path) -> None:
        self.config = msgspec.structs.replace(self.config, weight_cache_dir=str(directory))

    def send(self, message: Message) -> None:
        assert self.segments.broadcasts["scheduler"].try_send(encode(message))

    def received(self) -> list[Message]:
        messages = []
        while records := self.mailbox.receive():
            messages += [decode(payload) for _, payload in records]
        return messages

    def ask(self, worker: WorkerActor, message: Message) -> Message:
        """Return the one answer to a message."""
        self.send(message)
        ActorLoop(worker).turn()
        (answer,) = self.received()
        return answer

    def progress(self) -> list[str]:
        texts = []
        for event in self.events.received():
            assert isinstance(event, ActorState)
            texts.append(event.text)
        return texts

    def close(self) -> None:
        for worker in self.workers:
            worker.context.close()
        self.mailbox.close()
        self.events.close()
        self.segments.close()
        unlink_segments(self.run.run_id)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def other_weights(path: Path, factor: float = 1.5) -> Path:
    config = write_config(path, TINY)
    tensors = {name: values * np.float32(factor) for name, values in drawn_tensors(config).items()}
    write_safetensors(path / "model.safetensors", tensors)
    return path


def step_of(step_id: int, tokens: list[int], start: int, *, is_start: bool) -> Step:
    """Return a step that computes the rest of `tokens` in slot 1 and samples."""
    starts = []
    if is_start:
        sampling = SamplingParams(temperature=0.0, num_logprobs=0)
        starts = [SlotStart(1, "r", int32(tokens), len(PROMPT), sampling, int32([3, 4]))]
    count = len(tokens) - start
    return Step(step_id, starts, int32([1]), int32([start]), int32([count]), b"\1", b"", b"", b"", dispatch_ns=77)


def token_of(result: Message) -> int:
    assert isinstance(result, StepResult)
    return int(np.frombuffer(result.token_ids, np.int32)[0])


def expected_outputs(path: Path) -> list[int]:
    sequence = ServedSequence(PROMPT, SamplingParams(temperature=0.0), 6)
    serving = Serving(make_runner(path, max_model_len=64, num_kv_blocks=NUM_BLOCKS))
    serving.place(sequence, 0)
    serving.run([sequence])
    return sequence.outputs


def hello_of(engine: Engine) -> Hello:
    (hello,) = engine.received()
    assert isinstance(hello, Hello)
    return hello


def hello_fields(engine: Engine) -> tuple[str, int, int, str]:
    hello = hello_of(engine)
    return hello.actor, hello.epoch, hello.weight_version, hello.weight_path


def test_start_loads_weights_then_sends_hello(engine: Engine) -> None:
    """Weights, with progress for the terminal, then Hello to the scheduler."""
    worker = engine.worker()
    assert hello_fields(engine) == ("worker0", 1, 1, str(engine.model))
    texts = engine.progress()
    assert texts[0] == "starting"
    assert texts[-1].startswith("weights [####################] ")
    assert worker.context.counter("rank_weight_version").value == 1
    assert worker.context.counter("weights_bytes").value > 0
    assert worker.context.counter("weights_load_seconds").value > 0


@pytest.mark.parametrize("options", [{}, {"plan": "eager"}, {"ops": "reference"}], ids=str)
def test_long_step_updates_the_heartbeat(tmp_path: Path, options: dict[str, str]) -> None:
    """The heartbeat moves within a step, so that one longer than --hang-timeout is no hang."""
    engine = Engine(tmp_path, **options)
    worker = engine.worker()
    worker.context.row.beat(1)
    engine.send(step_of(0, PROMPT, 0, is_start=True))
    assert worker.do_work() == 1
    assert worker.context.row.heartbeat_ns > 1
    engine.close()


def test_steps_reuse_the_workers_own_tokens(engine: Engine) -> None:
    """Each sampled token is the worker's own input of the next step."""
    worker = engine.worker()
    engine.received()
    tokens = list(PROMPT)
    for step_id, expected in enumerate(expected_outputs(engine.model)):
        start = 0 if step_id == 0 else len(tokens) - 1
        result = engine.ask(worker, step_of(step_id, tokens, start, is_start=step_id == 0))
        assert token_of(result) == expected
        assert isinstance(result, StepResult)
        assert (result.step_id, result.rank, result.weight_version, result.dispatch_ns) == (step_id, 0, 1, 77)
        assert result.received_ns > 0
        assert result.run_ns > 0
        assert (result.idle_ns > 0) == (step_id > 0)
        tokens.append(expected)
    assert worker.context.counter("worker_steps_total").value == 6
    assert worker.context.counter("worker_tokens_total").value == len(PROMPT) + 5
    assert worker.context.counter("worker_busy_seconds_total").value > 0


def test_restarted_worker_continues_from_the_arena(engine: Engine) -> None:
    first = engine.worker()
    engine.received()
    expected = expected_outputs(engine.model)
    tokens = list(PROMPT)
    for step_id in range(3):
        start = 0 if step_id == 0 else len(tokens) - 1
        tokens.append(token_of(engine.ask(first, step_of(step_id, tokens, start, is_start=step_id == 0))))
    second = engine.worker(epoch=2)
    assert hello_fields(engine) == ("worker0", 2, 1, str(engine.model))
    for step_id in range(3, 6):
        result = engine.ask(second, step_of(step_id, tokens, len(tokens) - 1, is_start=step_id == 3))
        tokens.append(token_of(result))
    assert tokens[len(PROMPT) :] == expected


def test_reload_changes_the_answers(engine: Engine, tmp_path: Path) -> None:
    worker = engine.worker()
    engine.received()
    other = other_weights(tmp_path / "other")
    changed = engine.ask(worker, LoadWeights("c1", str(other), 2, []))
    assert isinstance(changed, WeightsChanged)
    assert (changed.command_id, changed.version, changed.path, changed.error) == ("c1", 2, str(other), "")
    assert worker.context.counter("rank_weight_version").value == 2
    result = engine.ask(worker, step_of(1, PROMPT, 0, is_start=True))
    assert isinstance(result, StepResult)
    assert result.weight_version == 2
    assert token_of(result) == expected_outputs(other)[0]


def test_broken_checkpoint_keeps_the_weights(engine: Engine, tmp_path: Path) -> None:
    worker = engine.worker()
    engine.received()
    before = worker.context.row.state
    changed = engine.ask(worker, LoadWeights("c1", str(tmp_path / "none"), 2, [0]))
    assert isinstance(changed, WeightsChanged)
    assert (changed.version, changed.path) == (1, str(engine.model))
    assert "config.json is missing" in changed.error
    assert worker.context.row.state == before
    assert token_of(engine.ask(worker, step_of(1, PROMPT, 0, is_start=True))) == expected_outputs(engine.model)[0]


def test_invalid_path_keeps_the_weights(engine: Engine) -> None:
    """The worker survives an error that no loader anticipated."""
    worker = engine.worker()
    engine.received()
    changed = engine.ask(worker, LoadWeights("c1", "/a\0b", 2, []))
    assert isinstance(changed, WeightsChanged)
    assert (changed.version, changed.path) == (1, str(engine.model))
    assert "null byte" in changed.error


def test_weights_for_other_ranks_are_ignored(engine: Engine, tmp_path: Path) -> None:
    worker = engine.worker()
    engine.received()
    engine.send(LoadWeights("c1", str(tmp_path / "none"), 2, [1]))
    ActorLoop(worker).turn()
    assert engine.received() == []


def test_cleared_weights_can_be_loaded_again(engine: Engine) -> None:
    worker = engine.worker()
    hello = hello_of(engine)
    assert engine.ask(worker, ClearWeights("c1")) == WeightsChanged("c1", 0, 0, "")
    assert worker.context.counter("weights_bytes").value == 0
    again = WeightsChanged("c2", 0, 1, str(engine.model), "", hello.weight_contents)
    assert engine.ask(worker, LoadWeights("c2", str(engine.model), 1, [])) == again


def test_step_without_weights_returns_an_error(engine: Engine) -> None:
    """A message of a dead scheduler may precede the first step of the next one: the worker survives."""
    worker = engine.worker()
    engine.received()
    engine.ask(worker, ClearWeights("c1"))
    refused = engine.ask(worker, step_of(7, PROMPT, 0, is_start=True))
    assert isinstance(refused, StepResult)
    assert (refused.step_id, refused.weight_version, refused.token_ids) == (7, 0, b"")
    assert "while the weights are cleared" in refused.error
    engine.ask(worker, LoadWeights("c2", str(engine.model), 1, []))
    assert token_of(engine.ask(worker, step_of(8, PROMPT, 0, is_start=True))) == expected_outputs(engine.model)[0]


def test_worker_starts_with_the_weights_in_use(engine: Engine, tmp_path: Path) -> None:
    other = other_weights(tmp_path / "other")
    engine.use(other, 5)
    engine.worker()
    assert hello_fields(engine) == ("worker0", 1, 5, str(other))


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "not-packed"])
def test_overwritten_checkpoint_uses_the_packed_weights(engine: Engine, tmp_path: Path, is_packed: bool) -> None:
    """The packed weights are in use. Without them a worker reports other contents, and loads nothing else under the version in
    use."""
    expected, path = expected_outputs(engine.model)[0], engine.model / "model.safetensors"
    if is_packed:
        engine.keep_packed(tmp_path / "packed")
    engine.worker()
    first = hello_of(engine)
    engine.use(engine.model, 1, first.weight_contents)
    path.write_bytes((other_weights(tmp_path / "other") / "model.safetensors").read_bytes())
    worker = engine.worker(2)
    second = hello_of(engine)
    assert (second.weight_version, second.weight_contents == first.weight_contents) == (1, is_packed)
    now = token_of(engine.ask(worker, step_of(1, PROMPT, 0, is_start=True)))
    assert now == (expected if is_packed else expected_outputs(engine.model)[0])
    again = engine.ask(worker, LoadWeights("c1", str(engine.model), 1, [], first.weight_contents))
    assert isinstance(again, WeightsChanged)
    assert "was overwritten" in again.error or is_packed
    assert again.contents == second.weight_contents


def test_replaced_checkpoint_of_another_shape(engine: Engine, tmp_path: Path) -> None:
    """The shape belongs to the run. Its packed weights are in use; without them there are none."""
    expected = expected_outputs(engine.model)[0]
    engine.keep_packed(tmp_path / "packed")
    engine.worker()
    contents = hello_of(engine).weight_contents
    engine.use(engine.model, 1, contents)
    write_checkpoint(engine.model, {**TINY, "vocab_size": 20, "num_key_value_heads": 2})
    worker = engine.worker(2)
    assert hello_of(engine).weight_contents == contents
    assert token_of(engine.ask(worker, step_of(1, PROMPT, 0, is_start=True))) == expected
    shutil.rmtree(tmp_path / "packed")
    worker = engine.worker(3)
    assert hello_fields(engine) == ("worker0", 3, 0, "")
    answer = engine.ask(worker, LoadWeights("c1", str(engine.model), 1, [], contents))
    assert isinstance(answer, WeightsChanged)
    assert "vocab_size: 40, 20" in answer.error


@pytest.mark.parametrize("options", [{}, {"load_format": "dummy"}], ids=["read", "dummy"])
def test_start_without_the_original_checkpoint(tmp_path: Path, options: dict[str, str]) -> None:
    """A worker that dies after a reload from elsewhere does not need it, nor does one with random weights."""
    engine = Engine(tmp_path, **options)
    if not options:
        engine.use(other_weights(tmp_path / "other"), 2)
    shutil.rmtree(engine.model)
    worker = engine.worker(2)
    assert hello_of(engine).weight_version == (1 if options else 2)
    token_of(engine.ask(worker, step_of(1, PROMPT, 0, is_start=True)))
    engine.close()


def test_random_weights_need_no_checkpoint_at_restart(tmp_path: Path) -> None:
    """Random weights depend only on a seed and a version. A command that loads them first checks the shape."""
    engine = Engine(tmp_path, load_format="dummy")
    worker = engine.worker()
    engine.received()
    write_config(tmp_path / "wide", {**TINY, "vocab_size": 20})
    refused = engine.ask(worker, LoadWeights("c1", str(tmp_path / "wide"), 2, []))
    write_config(tmp_path / "other", TINY)
    changed = engine.ask(worker, LoadWeights("c2", str(tmp_path / "other"), 3, []))
    assert isinstance(refused, WeightsChanged)
    assert isinstance(changed, WeightsChanged)
    assert ("not the model" in refused.error, refused.version, changed.error, changed.version) == (True, 1, "", 3)
    expected = token_of(engine.ask(worker, step_of(1, PROMPT, 0, is_start=True)))
    engine.use(tmp_path / "other", 3, changed.contents)
    shutil.rmtree(tmp_path / "other")
    worker = engine.worker(2)
    assert hello_fields(engine) == ("worker0", 2, 3, str(tmp_path / "other"))
    assert token_of(engine.ask(worker, step_of(2, PROMPT, 0, is_start=True))) == expected
    engine.close()


def test_restart_without_the_weights_in_use(engine: Engine, tmp_path: Path) -> None:
    """Above all it does not load those of the start."""
    engine.use(tmp_path / "gone", 5)
    engine.worker(2)
    assert hello_fields(engine) == ("worker0", 2, 0, "")
    assert any("gone" in text for text in (entry.text for entry in engine.segments.counters.errors.entries()))


def test_missing_checkpoint_fails_the_start(engine: Engine) -> None:
    (engine.model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        engine.worker()


def test_new_scheduler_gets_a_hello(engine: Engine) -> None:
    worker = engine.worker()
    loop = ActorLoop(worker)
    engine.received()
    engine.segments.counters.actor("scheduler").begin_epoch(2, 0)
    loop.turn()
    assert hello_fields(engine) == ("worker0", 1, 1, str(engine.model))
    assert token_of(engine.ask(worker, step_of(1, PROMPT, 0, is_start=True))) == expected_outputs(engine.model)[0]


def test_results_wait_while_the_ring_is_full(engine: Engine) -> None:
    worker = engine.worker()
    engine.received()
    outbox = worker.context.outbox("scheduler")
    filler = Hello("worker0", 1, 0, "x" * (outbox.max_record_bytes // 2))
    num_fillers = 0
    while outbox.send(filler):
        num_fillers += 1
    while outbox.send(Hello("worker0", 1)):
        num_fillers += 1
    for step_id in range(3):
        engine.send(step_of(step_id, PROMPT, 0, is_start=True))
    loop = ActorLoop(worker)
    for _ in range(3):
        loop.turn()
    assert worker.deadline_ns() > 0
    assert len(engine.received()) == num_fillers
    assert loop.turn() == 3
    results = engine.received()
    assert [result.step_id for result in results if isinstance(result, StepResult)] == [0, 1, 2]
    assert worker.deadline_ns() == 0


def test_stop_detaches_from_the_ring(engine: Engine) -> None:
    worker = engine.worker()
    engine.send(ClearWeights("c"))
    ActorLoop(worker).turn()
    assert engine.segments.broadcasts["scheduler"].active_readers() == [0]
    worker.on_stop()
    assert engine.segments.broadcasts["scheduler"].active_readers() == []
    assert worker.context.row.state != State.FAILED


# ------------------------------------------------------------------------------------------------------------- rank groups


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Engine]:
    """First of two ranks; the test is its peer."""
    made = Engine(tmp_path, tensor_parallel_size="2")
    yield made
    made.close()


def test_member_sends_hello_with_each_epoch(pair: Engine) -> None:
    worker = pair.worker()
    assert pair.received() == []
    for rank in ("worker0", "worker1"):
        pair.segments.set_member(rank, True)
        worker.do_work()
        hello = hello_of(pair)
        assert (hello.actor, hello.rank_group_epoch) == ("worker0", pair.segments.rank_groups[0].epoch)
    worker.do_work()
    assert pair.received() == []
    worker.on_peer("scheduler", 2)
    assert hello_of(pair).rank_group_epoch == 3


def test_step_ends_with_its_rank_group(pair: Engine) -> None:
    """The peer never comes, and is then gone: the step has no result, and the rank sends a hello with the new epoch and stays
    alive."""
    worker = pair.worker()
    for rank in ("worker0", "worker1"):
        pair.segments.set_member(rank, True)
    worker.do_work()
    hello_of(pair)
    step = msgspec.structs.replace(step_of(7, PROMPT, 0, is_start=True), rank_group_epoch=3)
    pair.send(step)
    running = Thread(target=worker.do_work)
    running.start()
    rank_group = pair.segments.rank_groups[0]
    wait_until(lambda: last_call(rank_group, 0).step == 7, what="rank 0 waits")
    pair.segments.evict("worker1")
    running.join()
    hello = hello_of(pair)
    assert (hello.epoch, hello.rank_group_epoch) == (1, rank_group.epoch)
    pair.segments.set_member("worker1", True)
    pair.send(step)  # of an epoch that is over
    worker.do_work()
    assert hello_of(pair).rank_group_epoch == rank_group.epoch
