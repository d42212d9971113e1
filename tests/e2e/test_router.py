"""A router and two engines on this machine, with a cluster key: answers are those of an engine, and whatever is killed or cut,
every stream continues with the bytes that it would have had. The tests share router and engines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from msgspec.structs import replace

from engine.cluster.frames import (
    PROTOCOL,
    Ask,
    Beat,
    Body,
    Drop,
    Forward,
    Goodbye,
    Greeting,
    Load,
    Prefixes,
    Refusal,
    Report,
    Results,
    Welcome,
    decode_frame,
    encode_frame,
)
from engine.cluster.key import CurveKeys, make_key_file, read_key_file
from engine.cluster.sockets import dealer, listen
from engine.messages import (
    Abort,
    ReloadWeights,
    Request,
    SamplingParams,
    SequencePart,
    SharedPart,
    TextOptions,
    TokenizedPrompt,
)
from tests.e2e import protocols
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess, leftovers
from tests.e2e.kinds import Json, ask_all, every_kind
from tests.e2e.router_process import Cluster, free_address
from tests.e2e.workload import Answer, answers, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
OPTIONS = ("--max-model-len", "1200", "--restart-limit", "100", "--threads", "1", *protocols.OPTIONS)
VICTIMS = ((-1, "link"), (-1, "tokenizer0"), (0, "link"), (1, "scheduler"), (0, "worker0"), (1, "cache"))
BODIES = mixed_bodies(8, seed=19, max_tokens=1000, max_prompt=150)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), MODEL, *OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Answer]:
    """Answers of an engine at its own address."""

    return answers(cluster.engines[0], BODIES)


def content(answer: Answer) -> tuple[list[int], list[float], str, str | None]:
    return answer.token_ids, answer.token_logprobs, answer.text, answer.finish_reason


class Deltas:
    """Chunks of streams as they arrive; each may have many tokens."""

    def __init__(self) -> None:
        self._num = 0
        self._arrived = asyncio.Event()

    def note(self) -> None:
        self._num += 1
        self._arrived.set()

    async def flow(self) -> None:
        """Wait until as many chunks have come as there are streams."""
        wanted = self._num + len(BODIES)
        while self._num < wanted:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), WATCHDOG_S)


def disturbed(cluster: Cluster, disturb: Callable[[Deltas], Awaitable[None]]) -> list[Answer]:
    """Return the answers of the router while something happens."""

    async def run() -> list[Answer]:
        deltas = Deltas()
        streams = asyncio.create_task(stream_all(cluster.router.url, BODIES, len(BODIES), deltas.note))
        await disturb(deltas)
        return await streams

    return asyncio.run(run())


def check(found: list[Answer], expected: list[Answer]) -> None:
    assert [answer.error for answer in found] == [None] * len(found)
    assert list(map(content, found)) == list(map(content, expected))


def test_answers_are_those_of_an_engine(cluster: Cluster, undisturbed: list[Answer]) -> None:
    check(answers(cluster.router, BODIES), undisturbed)
    wait_until(cluster.is_idle, what="the engines hold nothing")


def test_every_kind_of_request(cluster: Cluster) -> None:
    """Formats, tools, log-probabilities, several answers, stop strings: what the engine's own address answers."""
    calls = every_kind(24)

    def ask(process: EngineProcess) -> list[Json]:
        for engine in cluster.engines:  # usage counts cached tokens
            httpx.post(f"{engine.url}/admin/reset_prefix_cache", headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
        return asyncio.run(ask_all(process.url, calls))

    for call, expected, found in zip(calls, ask(cluster.engines[0]), ask(cluster.router), strict=True):
        assert found == expected, call


@pytest.mark.parametrize(("index", "actor"), VICTIMS)
def test_streams_survive_every_kill(cluster: Cluster, undisturbed: list[Answer], index: int, actor: str) -> None:
    """An actor of the router (-1) or of an engine dies in the middle of all streams."""

    async def kill(deltas: Deltas) -> None:
        await deltas.flow()
        await cluster.kill(index, actor)

    check(disturbed(cluster, kill), undisturbed)
    wait_until(cluster.is_idle, what="the engines hold nothing")


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_streams_survive_the_death_of_machines(cluster: Cluster, undisturbed: list[Answer], victims: tuple[int, ...]) -> None:
    """Engines die with all their processes and come back. If both do, the streams wait for one."""

    async def kill(deltas: Deltas) -> None:
        await deltas.flow()
        for index in victims:
            os.kill(cluster.engines[index].pid, signal.SIGKILL)
        for index in victims:
            await asyncio.to_thread(cluster.start_again, index)

    check(disturbed(cluster, kill), undisturbed)
    wait_until(lambda: all(engine.is_ready for engine in cluster.engines), what="the engines have said their addresses")
    cluster.wait_for(2)
    wait_until(cluster.is_idle, what="the engines hold nothing")


def test_silent_engine_is_left(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """An engine whose link hangs, so that its connection stays open: its streams continue on the other, and what it says later
    is dropped."""

    async def hang(deltas: Deltas) -> None:
        await deltas.flow()
        await asyncio.to_thread(cluster.engines[0].kill, "link", signal.SIGSTOP)
        await asyncio.to_thread(cluster.wait_until_gone)
        await asyncio.to_thread(cluster.engines[0].kill, "link", signal.SIGCONT)

    check(disturbed(cluster, hang), undisturbed)
    cluster.wait_for(2)
    wait_until(cluster.is_idle, what="the engines hold nothing")


def test_engine_that_leaves_the_list_is_drained(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """It gets nothing new, its streams end there, and it can come back."""
    before = cluster.router.metric("resubmissions_total")

    async def leave(deltas: Deltas) -> None:
        await deltas.flow()
        cluster.router.write(cluster.addresses[1:])
        await asyncio.to_thread(cluster.wait_for, 1)

    check(disturbed(cluster, leave), undisturbed)
    assert cluster.router.metric("resubmissions_total") == before
    wait_until(lambda: cluster.engines[0].metric("link_peers") == 0, what="its session has ended")
    cluster.router.list.write_text("10.0.0.1 9100\n")  # a mistake changes nothing
    wait_until(lambda: "line 1: '10.0.0.1 9100': expected host:port" in cluster.router.text, what="it is reported")
    check(answers(cluster.router, BODIES[:2]), undisturbed[:2])
    cluster.router.write(cluster.addresses)
    cluster.wait_for(2)


def test_engine_with_other_bytes_is_refused(cluster: Cluster) -> None:
    """Its block size differs, and with it the namespace; the message shows both."""
    address = free_address()
    with cluster.engine(address, "--block-size", "32"):
        cluster.router.write([*cluster.addresses, address])
        wait_until(lambda: "its answers would have other bytes" in cluster.router.text, what="it is refused")
        text = cluster.router.text
        assert "block size 32" in text
        assert "block size 16" in text
        assert cluster.num_ready() == 2
    cluster.router.write(cluster.addresses)


def test_limits_of_an_engine_are_answers(cluster: Cluster) -> None:
    """More log-probabilities than the engine has room for: a 400 for this request, and the session goes on."""
    with Peer(cluster, read_key_file(cluster.key)) as peer:
        peer.greet()
        peer.say(Forward(0, request(sampling={"num_logprobs": 100})), Forward(0, request()))
        bodies = iter(peer.hear, None)
        refusal = next(body for body in bodies if isinstance(body, Refusal))
        assert (refusal.rejected.status, "--max-logprobs" in refusal.rejected.message) == (400, True)
        assert any(output.finish_reason for body in bodies if isinstance(body, Results) for output in body.outputs)


def test_engines_are_shown(cluster: Cluster) -> None:
    """All views say the same, and losses of the tests before are counted."""
    router = cluster.router
    wait_until(lambda: router.metric("router_engines", state="gone") == 0, what="the list is read again")
    assert router.metric("router_engines", state="ready") == 2
    health, load = (httpx.get(f"{router.url}/{name}", timeout=WATCHDOG_S).json() for name in ("health", "load"))
    assert sorted(each["address"] for each in load["engines"]) == sorted(cluster.addresses)
    assert health["engines"] == load["engines"]
    shown = json.loads(router.ctl("engines", "--json"))
    assert sorted((each["address"], each["state"]) for each in shown) == [(each, "ready") for each in sorted(cluster.addresses)]
    for name, metric in (("num_routed", "requests_routed_total"), ("num_resubmitted", "replica_resubmissions_total")):
        assert 0 < sum(each[name] for each in shown) <= router.metric(metric)  # some went to no engine, as none was there
    for cause in ("connection", "silence", "link", "tokenizer", "scheduler"):
        assert router.metric("resubmissions_total", cause=cause) > 0, cause
    assert router.metric("recovery_seconds_count") > 0
    assert router.metric("link_missed_heartbeats_total") > 0
    assert [line.split()[1] for line in router.ctl("engines").splitlines()] == ["STATE", "ready", "ready"]
    assert [line.split()[0] for line in router.ctl("ps").splitlines()[2:]] == ["supervisor", "api0", "tokenizer0", "link"]


@pytest.mark.parametrize("address", [("--port", "{port}"), ("--host", "nowhere.invalid")])
def test_address_is_checked_before_an_engine_answers(cluster: Cluster, tmp_path: Path, address: tuple[str, str]) -> None:
    (tmp_path / "engines").write_text("127.0.0.1:9\n")
    given = [text.format(port=cluster.router.port) for text in address]
    command = [sys.executable, "-m", "tools.cli", "router", "--engines", str(tmp_path / "engines"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert (done.returncode, given[1] in done.stderr) == (2, True), done.stderr


def test_a_router_chooses_the_engine(cluster: Cluster) -> None:
    headers = {"x-data-parallel-rank": "1"}
    answer = httpx.post(f"{cluster.router.url}/v1/completions", json=BODIES[0], headers=headers, timeout=WATCHDOG_S)
    assert (answer.status_code, "this is a router" in answer.text) == (400, True)


# ------------------------------------------------------------------------------------------------------- hostile peers


OTHER = "0badbeef"  # run
SESSIONS = itertools.count(1)  # of a run, later ones are higher


class Peer:
    """A router that says what the test wants."""

    def __init__(self, cluster: Cluster, keys: CurveKeys | None, run: str = "0badcafe") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dealer(self._context, keys)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WATCHDOG_S * 1000))
        self.socket.setsockopt(zmq.SNDTIMEO, int(WATCHDOG_S * 1000))
        self.socket.connect(f"tcp://{cluster.addresses[0]}")
        self._run, self._sent, self._seen = run, 0, 0

    def greet(self, session: int = 0, protocol: int = PROTOCOL) -> None:
        self.say(Greeting(protocol, self._run, session or next(SESSIONS)))

    def say(self, *bodies: Body) -> None:
        for body in bodies:
            self._sent += 1
            self.socket.send(encode_frame(self._sent, body))

    def hear(self) -> Body:
        body = decode_frame(self.socket.recv(), self._seen)
        self._seen += 1
        return body

    def farewell(self) -> str:
        """Return why the engine ends the session."""
        while True:
            body = self.hear()
            if isinstance(body, Goodbye):
                return body.reason

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self._context.term()


def request(request_id: str = "one", tokenizer: str = "tokenizer0", **changes: object) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 4, **changes.pop("sampling", {})})  # type: ignore[dict-item]
    prompt = TokenizedPrompt(changes.pop("tokens", bytes(40)), 4)  # type: ignore[arg-type]
    shared = SharedPart("key", "api0", 1, sampling, TextOptions(), **changes.pop("shared", {}))  # type: ignore[arg-type]
    return Request(tokenizer, shared, [prompt], [SequencePart(request_id, **changes)])  # type: ignore[arg-type]


WRONG = {
    "no frame": b"\x93\x01\x02\x03",
    "empty": b"",
    "a gap": encode_frame(7, Beat()),
    "a repetition": encode_frame(1, Beat()),
    "of an engine": encode_frame(2, Welcome(PROTOCOL, "", "", "", "", [], [], [])),
    "replica": encode_frame(2, Forward(9, request())),
    "attempt": encode_frame(2, Forward(0, request(attempt=-4))),
    "group": encode_frame(2, Forward(0, request(group_id="x" * 5000))),
    "aborted id": encode_frame(2, Drop(0, Abort("x" * 5000, 0))),
    "contents": encode_frame(2, Ask("id", ReloadWeights(contents="f" * 5000))),
    "nested": encode_frame(2, Beat())[:2] + b"\x91" * 5000,
}


def test_wrong_frames_cost_the_session_of_their_sender(cluster: Cluster) -> None:
    keys = read_key_file(cluster.key)
    before = {name: row["epoch"] for name, row in cluster.engines[0].actors().items()}
    for name, frame in WRONG.items():
        with Peer(cluster, keys) as peer:
            peer.greet()
            peer.socket.send(frame)
            assert peer.farewell(), name
    assert {name: row["epoch"] for name, row in cluster.engines[0].actors().items()} == before
    assert cluster.num_ready() == 2


REFUSED = {
    "token ids": request(tokens=b"\xff\xff\xff\x7f"),
    "bytes of token ids": request(tokens=b"123"),
    "top_p": request(sampling={"top_p": float("nan")}),
    "outside the vocabulary": request(sampling={"stop_token_ids": [1 << 40]}),
    "seed": request(sampling={"seed": -1}),
    "prompt": request(prompt_index=3),
    "token ids outside": request(resume_token_ids=b"\xff" * 8),
    "a user": request(shared={"source": "x" * 5000}),
}


def test_requests_with_wrong_numbers_are_refused(cluster: Cluster) -> None:
    """Each costs itself; the session goes on."""
    with Peer(cluster, read_key_file(cluster.key)) as peer:
        peer.greet()
        for text, wrong in REFUSED.items():
            peer.say(Forward(0, wrong))
            body = next(body for body in iter(peer.hear, None) if isinstance(body, Refusal))
            assert (body.rejected.status, text in body.rejected.message) == (400, True), body.rejected.message


def test_damaged_requests_cost_no_actor(cluster: Cluster) -> None:
    """A request with some bytes changed is refused, or answered as another one."""
    keys, rng = read_key_file(cluster.key), random.Random(8)
    before = {name: row["epoch"] for name, row in cluster.engines[0].actors().items()}
    whole = encode_frame(2, Forward(0, request(sampling={"stop_token_ids": [5], "logit_bias": {7: 1.0}, "seed": 9})))
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(3, len(whole))] = rng.randrange(256)
        with Peer(cluster, keys) as peer:
            peer.greet()
            peer.socket.send(bytes(damaged))
            assert isinstance(peer.hear(), Welcome)
    wait_until(cluster.is_idle, what="the engines hold nothing")
    check(answers(cluster.router, BODIES[:2]), answers(cluster.engines[0], BODIES[:2]))
    assert {name: row["epoch"] for name, row in cluster.engines[0].actors().items()} == before


def test_wrong_greetings_are_answered(cluster: Cluster) -> None:
    keys = read_key_file(cluster.key)
    with Peer(cluster, keys) as peer:
        peer.say(Beat())
        assert "no session" in peer.farewell()
    with Peer(cluster, keys) as peer:
        peer.greet(protocol=PROTOCOL + 1)
        assert "the same version" in peer.farewell()
    with Peer(cluster, keys, run="../../etc") as peer:
        peer.greet()
        assert "names no run" in peer.farewell()
    with Peer(cluster, keys, OTHER) as first, Peer(cluster, keys, OTHER) as second, Peer(cluster, keys, OTHER) as third:
        first.greet(session=1005)
        assert isinstance(first.hear(), Welcome)
        second.greet(session=1006)
        assert isinstance(second.hear(), Welcome)
        assert "a later session" in first.farewell()
        third.greet(session=1006)
        assert "older than the open one" in third.farewell()


def test_peer_without_the_key_gets_no_connection(cluster: Cluster, tmp_path: Path) -> None:
    make_key_file(tmp_path / "other.key")
    other = read_key_file(tmp_path / "other.key")
    ours = read_key_file(cluster.key)
    stolen = CurveKeys(ours.engine_public, b"", other.router_public, other.router_secret)
    for keys in (None, other, stolen):
        with Peer(cluster, keys) as peer:
            peer.socket.setsockopt(zmq.SNDTIMEO, 1500)
            peer.socket.setsockopt(zmq.RCVTIMEO, 1500)
            with pytest.raises(zmq.Again):  # noqa: PT012 - either fails
                peer.greet()
                peer.farewell()
    assert cluster.num_ready() == 2


def test_false_engines_cost_only_their_sessions(cluster: Cluster) -> None:
    """Engines of the list that say what no engine says, before or instead of a welcome."""
    keys, context = read_key_file(cluster.key), zmq.Context[Any]()
    load = Load(True, 1, 0, 0, 0, 0, 4, 9, 9, 0, 0, 0)
    with Peer(cluster, keys) as peer:
        peer.greet()
        welcome = peer.hear()
    huge = Report(1, 0, 0, [replace(load, num_requests_running=1 << 63)])
    wrong: list[list[Body]] = [[Report(1, 0, 0, [])], [welcome, huge], [welcome, Prefixes(0, False, b"123")]]
    addresses = [free_address() for _ in wrong]
    before = {name: row["epoch"] for name, row in cluster.router.actors().items()}
    sockets = [listen(context, address, keys) for address in addresses]
    try:
        cluster.router.write([*cluster.addresses, *addresses])
        for socket, bodies in zip(sockets, wrong, strict=True):
            socket.setsockopt(zmq.RCVTIMEO, int(WATCHDOG_S * 1000))
            identity, _ = socket.recv_multipart()
            for number, body in enumerate(bodies, 1):
                socket.send_multipart([identity, encode_frame(number, body)])
        wait_until(lambda: cluster.states().count("gone") == len(wrong), what="they are left")
        check(answers(cluster.router, BODIES[:2]), answers(cluster.engines[0], BODIES[:2]))
    finally:
        cluster.router.write(cluster.addresses)
        for socket in sockets:
            socket.close(0)
        context.term()
    after = {name: row["epoch"] for name, row in cluster.router.actors().items()}
    assert [after[name] for name in ("link", "tokenizer0", "api0")] == [before[name] for name in ("link", "tokenizer0", "api0")]


def test_long_salt_costs_no_session(cluster: Cluster) -> None:
    body = BODIES[0] | {"stream": False, "cache_salt": "x" * 1000}
    for process in (cluster.engines[0], cluster.router):
        assert httpx.post(f"{process.url}/v1/completions", json=body, timeout=WATCHDOG_S).status_code == 200


def test_sequences_of_a_peer_that_goes_are_aborted(cluster: Cluster) -> None:
    """It leaves a request open that would take long, and vanishes; so does one that does not read."""
    keys = read_key_file(cluster.key)
    engine = cluster.engines[0]
    with Peer(cluster, keys) as peer:
        peer.greet()
        peer.say(Forward(0, request(sampling={"ignore_eos": True, "min_tokens": 1000})))
        wait_until(lambda: engine.metric("link_peers") == 2, what="the peer is there")
    wait_until(lambda: engine.metric("link_peers") == 1, what="its session has ended")
    wait_until(cluster.is_idle, what="the engines hold nothing")


def test_nothing_is_left(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """The last test: all processes end in order, and leave no process, segment or directory."""
    check(answers(cluster.router, BODIES), undisturbed)
    everyone = [cluster.router, *cluster.engines]
    pids = [int(row["pid"]) for process in everyone for row in process.actors().values() if row["pid"]]
    assert [process.stop() for process in everyone] == [0, 0, 0]
    assert leftovers(pids) == []
    assert str(read_key_file(cluster.key).engine_secret) not in "".join(process.text for process in everyone)
