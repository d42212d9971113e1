"""A tokenizer's view of the replicas, on real rings and counters: load, cached prefixes, and availability."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.block_keys import BlockExtras, hash_blocks
from engine.messages import (
    Abort,
    Message,
    Rejected,
    Request,
    SequencePart,
    SequenceRequest,
    TokensPrompt,
    WeightsState,
    decode,
)
from engine.process.context import ActorContext
from engine.process.run_directory import Run, new_run_id
from engine.process.segments import RunSegments, unlink_segments
from engine.process.topology import default_plan
from engine.tokenizer.ready import ReadyPrompt, ReadyRequest, ReadySequence
from engine.tokenizer.replicas import UNKNOWN, Replicas
from shm.counters import State
from shm.fingerprints import KIND, FingerprintWriter, fingerprint_of, state_fingerprint_of
from shm.mailbox import Mailbox
from shm.segment import Segment, segment_name
from tests.configurations import engine_config
from tests.engine.scheduler.echo_media import picture, prompt_of
from tests.engine.tokenizer.test_tokenizer import Bench, outputs, submit
from tests.requests import sequence_request

BLOCK_SIZE = 16
PROMPT = list(range(100, 200))


class Engine:
    """Two replicas without their processes; `replicas` is the tokenizer's end."""

    def __init__(self, directory: Path, **options: Any) -> None:
        run_id = new_run_id()
        config = engine_config(
            model="/none",
            max_model_len=512,
            num_kv_blocks=64,
            max_num_seqs=4,
            max_waiting=2,
            run_id=run_id,
            run_dir=str(directory),
            data_parallel_size=2,
            **options,
        )
        self.run_id = run_id
        self.segments = RunSegments.of(config, [plan.name for plan in default_plan(config)])
        for replica in range(2):
            self.gauge(replica, "num_free_slots", config.max_num_seqs)
            self.gauge(replica, "num_free_kv_blocks", config.num_kv_blocks)
            for name in (f"scheduler{replica}", f"worker{replica}"):
                self.segments.counters.actor(name).set_state(State.READY)
        self.context = ActorContext(Run(run_id, directory), config, "tokenizer0", 1)
        self.replicas = Replicas(self.context)
        self._mailboxes = [Mailbox.attach(run_id, f"scheduler{replica}", 1) for replica in range(2)]

    def gauge(self, replica: int, name: str, value: float) -> None:
        self.segments.counters.counter(name, f"scheduler{replica}").set(value)

    def cached(
        self, replica: int, token_ids: list[int], extras: BlockExtras | None = None, states: tuple[int, ...] = ()
    ) -> None:
        """`states`: numbers of blocks that a recurrent model continues after."""
        keys: list[bytes] = []
        hash_blocks(array("i", token_ids), BLOCK_SIZE, keys, len(token_ids), extras)
        writer = FingerprintWriter(Segment.attach(segment_name(self.run_id, KIND, f"cache{replica}")))
        writer.add_all([*map(fingerprint_of, keys), *(state_fingerprint_of(keys[each - 1]) for each in states)])
        writer.close()

    def received(self, replica: int) -> list[Message]:
        return [decode(payload) for _, payload in self._mailboxes[replica].receive()]

    def choose(self, sequence: ReadySequence, pinned: int = UNKNOWN) -> int:
        return self.replicas.choose(sequence, pinned)[0]

    def send(self, replica: int, sequence: ReadySequence, num_tokens: int = 100) -> None:
        self.replicas.send(replica, sequence, num_tokens)
        self.replicas.flush()

    def reasons(self) -> dict[str, int]:
        cells, replicas = self.context.counters.counter, map(str, range(len(self._mailboxes)))
        rows = ("prefix", "load", "hash", "group", "pinned")
        named = [
            (reason, cells("requests_routed_total", "tokenizer0", reason=reason, replica=replica))
            for replica in replicas
            for reason in rows
        ]
        return {reason: sum(int(cell.value) for name, cell in named if name == reason) for reason in rows}

    def close(self) -> None:
        self.replicas.close()
        self.context.close()
        for mailbox in self._mailboxes:
            mailbox.close()
        self.segments.close()
        unlink_segments(self.run_id)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="tokamak-test-") as directory:
        made = Engine(Path(directory))
        yield made
        made.close()


def ready(request: SequenceRequest) -> ReadySequence:
    prompt = ReadyPrompt.of(TokensPrompt(request.prompt.token_ids), request.prompt)
    return ReadySequence(ReadyRequest.of(request.shared, request.shared.sampling), prompt, request.own)


def request_of(prompt: list[int], request_id: str = "r", group_id: str = "", **sampling: Any) -> ReadySequence:
    return ready(sequence_request(array("i", prompt).tobytes(), request_id, group_id=group_id, **sampling))


def test_longest_cached_prefix_is_found(engine: Engine) -> None:
    """The common cached part counts for both, and never the whole prompt: its last token is computed."""
    engine.cached(0, PROMPT[:32])
    engine.cached(1, PROMPT[:96])
    assert engine.replicas.choose(request_of(PROMPT)) == (1, 4)
    assert engine.replicas.choose(request_of(PROMPT[:96])) == (1, 16)
    assert engine.reasons() == {"prefix": 2, "load": 0, "hash": 0, "group": 0, "pinned": 0}
    same = request_of(PROMPT[:40] + PROMPT[:40])  # both have its first two blocks
    assert engine.replicas.choose(same)[1] == 80 - 32
    assert engine.reasons()["hash"] == 1
    assert engine.replicas.choose(request_of(PROMPT, num_prompt_logprobs=0))[1] == 100  # computes its whole prompt


def test_recurrent_model_continues_only_from_a_state(tmp_path: Path) -> None:
    engine = Engine(tmp_path, num_states=16)
    engine.cached(0, PROMPT[:96])
    engine.cached(1, PROMPT[:64], states=(1, 3))
    assert engine.replicas.choose(request_of(PROMPT)) == (1, 100 - 48)
    engine.close()


def test_pictures_are_routed_to_their_cached_blocks(engine: Engine) -> None:
    """Routing uses the scheduler's keys: the same tokens with another picture are elsewhere."""
    prompt, fields = prompt_of(PROMPT[:10], picture("cat", 20), PROMPT[:40])
    _, others = prompt_of(PROMPT[:10], picture("dog", 20), PROMPT[:40])
    engine.cached(1, prompt[:64], BlockExtras.of(fields["units"], fields["media"], b""))
    assert engine.replicas.choose(request_of(prompt, **fields)) == (1, 70 - 64)
    assert engine.replicas.choose(request_of(prompt, **others))[1] == 70
    assert engine.replicas.choose(request_of(prompt))[1] == 70


def test_sent_requests_count_until_they_are_taken(engine: Engine) -> None:
    first = engine.choose(request_of(PROMPT))
    engine.send(first, request_of(PROMPT, "a"))
    assert engine.choose(request_of(PROMPT)) == 1 - first
    assert isinstance(engine.received(first)[0], Request)
    assert engine.choose(request_of(PROMPT)) == first
    engine.gauge(first, "num_tokens_to_compute", 100)  # from here on the scheduler says so
    assert engine.choose(request_of(PROMPT)) == 1 - first


def test_unavailable_replica_gets_nothing(engine: Engine) -> None:
    engine.cached(1, PROMPT[:96])
    for actor in ("scheduler1", "worker1"):
        for state in (State.DEAD, State.LOADING):
            engine.segments.counters.actor(actor).set_state(state)
            assert engine.choose(request_of(PROMPT)) == 0
        engine.segments.counters.actor(actor).set_state(State.RUNNING)
        assert engine.choose(request_of(PROMPT)) == 1
    engine.gauge(1, "engine_state", WeightsState.LOADING)  # its weights are reloaded
    assert engine.choose(request_of(PROMPT)) == 0
    engine.gauge(1, "engine_state", WeightsState.CLEARED)
    assert engine.choose(request_of(PROMPT)) == 0
    engine.gauge(1, "engine_state", WeightsState.PAUSED)
    assert engine.choose(request_of(PROMPT)) == 1
    assert engine.choose(request_of(PROMPT), pinned=0) == 0
    engine.gauge(1, "num_requests_waiting", 2)
    assert engine.choose(request_of(PROMPT)) == 0
    assert engine.replicas.is_any_left(frozenset({1}))
    assert not engine.replicas.is_any_left(frozenset({0}))


def test_a_group_stays_together_while_it_is_open(engine: Engine) -> None:
    sample = request_of(PROMPT, "a-0", group_id="a")
    home = engine.choose(sample)
    engine.send(home, sample)
    assert engine.choose(request_of(PROMPT, "a-1", group_id="a")) == home
    engine.segments.counters.actor(f"scheduler{home}").set_state(State.DEAD)
    assert engine.choose(request_of(PROMPT, "a-2", group_id="a")) == 1 - home
    engine.segments.counters.actor(f"scheduler{home}").set_state(State.READY)
    engine.replicas.ended("a")
    assert engine.choose(request_of(PROMPT, "a-3", group_id="a")) == 1 - home  # there is still what was sent before
    assert engine.reasons()["group"] == 1


@pytest.mark.parametrize(("before", "aborted"), [(0, [0]), (1, []), (UNKNOWN, [0])])
def test_moved_sequence_is_aborted_at_its_old_replica(engine: Engine, before: int, aborted: list[int]) -> None:
    own = SequencePart("r", attempt=2, replica=before)
    engine.replicas.leave(1, "r", own)
    engine.replicas.leave(1, "r", msgspec.structs.replace(own, attempt=0, replica=UNKNOWN))  # a new request was nowhere
    engine.replicas.flush()
    assert [replica for replica in range(2) for message in engine.received(replica) if message == Abort("r", 1)] == aborted


# ------------------------------------------------------------------------------------------------ the tokenizer's own part


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, data_parallel_size=2) as made:
        yield made


def taken(bench: Bench) -> tuple[int, SequenceRequest]:
    """Return the scheduler that got a request and the request; nothing else was sent to any."""
    messages = [(replica, message) for replica in range(2) for message in bench.received(f"scheduler{replica}")]
    assert len(messages) == 1, messages
    replica, message = messages[0]
    assert isinstance(message, SequenceRequest)
    return replica, message


def test_full_replica_passes_a_sequence_on(bench: Bench) -> None:
    """A request refused by all is refused."""
    bench.send("api0", submit("Hello world", group_id="g"))
    first, request = taken(bench)
    refusal = Rejected("r", 0, "api0", 429, "full", retry_after_s=1)
    bench.send(f"scheduler{first}", refusal)
    assert taken(bench) == (1 - first, request)
    assert bench.received() == []
    bench.send(f"scheduler{1 - first}", refusal)
    assert bench.one(Rejected) == refusal
    assert bench.count("open_streams") == 0


@pytest.mark.parametrize("reason", ["pinned", "refused"])
def test_refusals_that_are_not_passed_on(bench: Bench, reason: str) -> None:
    """A pinned sequence, and one that can run nowhere."""
    bench.send("api0", submit("Hello world", pinned_replica=1 if reason == "pinned" else -1))
    replica, _ = taken(bench)
    assert replica == 1 or reason != "pinned"
    bench.send(f"scheduler{replica}", Rejected("r", 0, "api0", 429 if reason == "pinned" else 400, "no"))
    assert bench.one(Rejected).message == "no"


def test_delta_names_its_replica(bench: Bench) -> None:
    sample = submit("Hello world", max_tokens=8)
    bench.send("api0", sample)
    first, request = taken(bench)
    bench.send(f"scheduler{first}", outputs([5]))
    assert bench.delta().replica == first
    bench.set_state(f"scheduler{first}", State.DEAD)
    bench.send(
        "api0", submit("Hello world", max_tokens=8, attempt=1, resume_token_ids=array("i", [5]).tobytes(), replica=first)
    )
    assert bench.received(f"scheduler{first}") == [Abort("r", 0)]
    again, moved = taken(bench)
    assert (again, moved.own.attempt, moved.prompt) == (1 - first, 1, request.prompt)
    bench.send(f"scheduler{first}", outputs([6]))  # it had sent that before it died
    assert bench.received() == []
    bench.send(f"scheduler{again}", outputs([6], attempt=1))
    assert (bench.delta().replica, bench.count("messages_dropped_total")) == (again, 1)
