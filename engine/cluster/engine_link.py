"""The link of an engine: one more tokenizer to the schedulers, which works for routers on other machines.

    router  Forward, Drop, Leave       ->  link  ->  Request, Abort        schedulers
    router  Results, Refusal           <-  link  <-  Outputs, Rejected     schedulers
    router  Prefixes, Report           <-  link  <-  gauges, fingerprints of cached blocks
    router  Want, Piece                <->  link  <->  a media process (`engine_files.py`)
    router  Ask, Answer                <->  link  <->  the supervisor (`engine_orders.py`)

Ids of a router's requests carry the router's run in front, so that two routers never clash. A router that is gone, silent, does
not read, or sends what is no frame loses its session and its sequences here, and nothing else happens: it submits them again.
"""

from __future__ import annotations

import time
from collections import deque
from logging import DEBUG, WARNING
from typing import Any

import msgspec
import zmq

from engine.cluster.cached_blocks import CachedBlocks
from engine.cluster.engine_files import EngineFiles
from engine.cluster.engine_orders import EngineOrders
from engine.cluster.frames import (
    MAX_NAME_CHARACTERS,
    MAX_PIECE_BYTES,
    PROTOCOL,
    Answer,
    Ask,
    Beat,
    Body,
    Drop,
    Forward,
    Goodbye,
    Greeting,
    Leave,
    NotReadyError,
    Piece,
    Prefixes,
    Refusal,
    Report,
    Results,
    Want,
    Welcome,
    WrongFrameError,
    decode_frame,
    encode_frame,
    from_wire,
)
from engine.cluster.key import read_key_file
from engine.cluster.namespace import facts_text, namespace_of, namespace_without_kernels
from engine.cluster.peer import OpenSequence, ParkedRequest, Peer
from engine.cluster.replica_gauges import ReplicaGauges
from engine.cluster.request_check import check_names, check_request
from engine.cluster.sockets import KeyGate, LinkPoller, Socket, listen
from engine.cluster.vocabulary import vocab_size_of
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.keys import without_secrets
from engine.messages import (
    Abort,
    AdapterUse,
    Message,
    Output,
    Outputs,
    Prepared,
    Rejected,
    Request,
    SequencePart,
    WeightsRecord,
    encode,
)
from engine.process.actor import Actor
from engine.process.adapters import AdapterRegistry
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox, Outbox, earliest
from engine.process.run_directory import is_run_id
from engine.process.topology import SCHEDULER, role_of

LOOK_INTERVAL_NS = 1_000_000_000  # between looks for routers that are silent
PREFIX_INTERVAL_NS = 50_000_000
FORGET_NS = 10_000_000_000  # of silence, after which a router's sequences are aborted
MAX_KEPT_FRAMES = 4096  # for a router that does not read; then its session ends
MAX_KEPT_BYTES = 64 << 20
MAX_WAITING_RECORDS = 256  # for a scheduler's ring; then nothing is read from routers
MAX_FRAMES_PER_TURN = 256
MAX_ROUTERS = 64
MAX_OPEN = 1 << 16  # sequences of a router, and the bytes of their requests; then it gets a 429
MAX_OPEN_BYTES = 512 << 20


class EngineLink(Actor):
    """Serves routers until the engine ends."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        config = context.config
        keys = read_key_file(config.cluster_key_file) if config.cluster_key_file else None
        self._zmq: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._gate = KeyGate(self._zmq, keys) if keys else None
        self._socket = listen(self._zmq, config.cluster_listen, keys)
        self._poller = LinkPoller(context.mailbox)
        self._poller.add(self._socket)
        if self._gate:
            self._poller.add(self._gate.socket)
        self._orders = EngineOrders(self._zmq, context.run, config.cluster_checkpoints)
        self._poller.add(self._orders.socket)
        self._peers: dict[bytes, Peer] = {}
        self._runs: dict[str, Peer] = {}
        self._outboxes: list[Outbox] = [context.outbox(name) for name in context.schedulers]
        self._to_schedulers = [BackloggedOutbox(outbox.send_bytes) for outbox in self._outboxes]
        self._replicas = [ReplicaGauges(context, name) for name in context.schedulers]
        self._cached = [CachedBlocks(context, index) for index in range(len(context.schedulers))]
        self._next_look_ns = self._next_prefixes_ns = 0
        self._adapters = AdapterRegistry(context) if config.max_loras else None
        self._files = EngineFiles(context) if config.media_processes else None
        self._parked: list[ParkedRequest] = []
        self._ended: deque[bytes] = deque(maxlen=MAX_ROUTERS)  # connections whose session has ended
        self._vocab_size = vocab_size_of(context.run)
        self._versions: list[int] = []  # of the weights of each replica, as the routers know them
        self._known_versions: set[int] = set()  # all that they know
        self._is_report_due = False
        self._num_routers = context.counter("link_peers")
        self._num_open = context.counter("link_open_sequences")
        self._received_bytes = context.counter("link_received_bytes_total")
        self._sent_bytes = context.counter("link_sent_bytes_total")
        self._num_ended = context.counter("link_sessions_ended_total")
        self._dropped = context.counter("messages_dropped_total")

    # ------------------------------------------------------------------------------------------------------ the loop

    def wait(self, timeout_ns: int) -> None:
        self._poller.wait(timeout_ns)

    def do_work(self) -> int:
        now_ns = time.monotonic_ns()
        num_done = self._gate.answer() if self._gate else 0
        num_done += self._receive_frames() + self._answer_orders()
        num_done += sum(outbox.flush() for outbox in self._to_schedulers) + (self._files.flush() if self._files else 0)
        if now_ns >= self._next_prefixes_ns:
            self._next_prefixes_ns = now_ns + PREFIX_INTERVAL_NS
            self._tell_prefixes()
        self._report()
        if now_ns >= self._next_look_ns:
            self._forget_silent(now_ns)
        for peer in list(self._peers.values()):
            self._flush(peer)
        self._num_open.set(sum(len(peer.open) for peer in self._peers.values()))
        return num_done

    def deadline_ns(self) -> int:
        waiting_ns = earliest(*(outbox.deadline_ns() for outbox in self._to_schedulers))
        kept_ns = time.monotonic_ns() + 2_000_000 if any(peer.kept for peer in self._peers.values()) else 0
        look_ns = self._next_look_ns if self._peers else 0
        taken_ns = time.monotonic_ns() + 1_000_000 if self._is_report_due else 0
        return earliest(waiting_ns, kept_ns, look_ns, taken_ns)

    def on_stop(self) -> None:
        for peer in list(self._peers.values()):
            self._end(peer, "the engine stops")
        for outbox in self._to_schedulers:
            outbox.flush()
        self._poller.close()
        self._orders.close()
        self._socket.close(100)
        if self._gate:
            self._gate.close()
        self._zmq.term()

    # -------------------------------------------------------------------------------------------- from the schedulers

    def on_message(self, sender: str, message: Message) -> None:
        if isinstance(message, Outputs):
            self._take_outputs(message.outputs)
        elif isinstance(message, Rejected):
            self._take_rejected(message)
        elif isinstance(message, Prepared) and self._files is not None:
            self._files.prepared(message)
            self._unpark()
        else:
            raise AssertionError(f"unexpected {type(message).__name__} from {sender}")

    def on_peer(self, name: str, epoch: int) -> None:
        """A scheduler that restarted has no sequences: the routers learn its epoch and submit theirs again."""
        if self._files is not None:
            self._files.on_peer(name)
        if role_of(name) != SCHEDULER:
            return
        index = self.context.schedulers.index(name)
        self._to_schedulers[index].clear()
        for peer in self._peers.values():
            for request_id in [key for key, open_ in peer.open.items() if open_.scheduler == index]:
                self._close_sequence(peer, request_id)
            peer.is_report_due = True

    def _take_outputs(self, outputs: list[Output]) -> None:
        found: dict[tuple[str, str], list[Output]] = {}
        for output in outputs:
            if output.weight_version not in self._known_versions:
                self._weights_changed()
            peer, request_id, open_ = self._found(output.request_id, output.attempt)
            if peer is None or open_ is None:
                self._dropped.add(1)
                continue
            output.request_id = request_id
            found.setdefault((peer.run, open_.tokenizer), []).append(output)
            if output.finish_reason:
                self._close_sequence(peer, request_id)
        for (run, tokenizer), own in found.items():
            if run in self._runs:  # its session may just have ended
                self._send(self._runs[run], Results(tokenizer, own))

    def _take_rejected(self, rejected: Rejected) -> None:
        peer, request_id, open_ = self._found(rejected.request_id, rejected.attempt)
        if peer is None or open_ is None:
            self._dropped.add(1)
            return
        self._close_sequence(peer, request_id)
        rejected.request_id = request_id
        self._send(peer, Refusal(open_.tokenizer, rejected))

    def _found(self, name: str, attempt: int) -> tuple[Peer | None, str, OpenSequence | None]:
        """Return the router of a sequence, its id there, and what is known of it; None: it is not open."""
        run, _, request_id = name.partition(".")
        peer = self._runs.get(run)
        open_ = peer.open.get(request_id) if peer else None
        return peer, request_id, open_ if open_ is not None and open_.attempt == attempt else None

    # ------------------------------------------------------------------------------------------------- from the routers

    def _receive_frames(self) -> int:
        num_done = 0
        while num_done < MAX_FRAMES_PER_TURN and all(len(outbox) < MAX_WAITING_RECORDS for outbox in self._to_schedulers):
            try:
                identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            num_done += 1
            data = b"".join(parts)
            self._received_bytes.add(len(data))
            self._take_frame(identity, data)
        return num_done

    def _take_frame(self, identity: bytes, data: bytes) -> None:
        peer = self._peers.get(identity)
        if identity in self._ended:
            return  # sent before it knew
        try:
            body = decode_frame(data, peer.seen if peer else 0)
            if peer is None:
                self._greeted(identity, body)
                return
            peer.seen += 1
            peer.heard_ns = time.monotonic_ns()
            self._take_body(peer, body)
        except WrongFrameError as error:
            self.context.log.log(DEBUG if isinstance(error, NotReadyError) else WARNING, "a router's session ends: %s", error)
            if peer is not None:
                self._end(peer, str(error))
            else:
                self._say_goodbye(identity, 1, str(error))

    def _greeted(self, identity: bytes, body: Body) -> None:
        if not isinstance(body, Greeting):
            raise WrongFrameError("there is no session; begin one with a greeting")
        if body.protocol != PROTOCOL:
            raise WrongFrameError(f"protocol {body.protocol}, expected {PROTOCOL}; use the same version on all machines")
        if not is_run_id(body.run):
            raise WrongFrameError("the greeting names no run")
        known = self._runs.get(body.run)
        if known is not None and known.session >= body.session:
            raise WrongFrameError(f"session {body.session} of {body.run} is older than the open one")
        if known is not None:
            self._end(known, "a later session has begun")
        if len(self._peers) >= MAX_ROUTERS:
            raise WrongFrameError(f"{MAX_ROUTERS} routers are connected, which is the limit")
        welcome = self._welcome(body)
        peer = Peer(identity, body.run, body.session, time.monotonic_ns(), seen=1)
        self._peers[identity] = self._runs[body.run] = peer
        self._num_routers.set(len(self._peers))
        self.context.log.info("router %s has connected", body.run)
        self._send(peer, welcome)
        for index, cached in enumerate(self._cached):
            self._send(peer, Prefixes(index, True, cached.whole()))
        peer.is_report_due = True

    def _welcome(self, greeting: Greeting) -> Welcome:
        """Return the answer to a greeting. Raises WrongFrameError as long as it is not known which weights the engine has."""
        context = self.context
        records = self._weights()
        if any(not record.contents.get(record.version) for record in records):
            raise NotReadyError("the engine is starting")
        return Welcome(
            PROTOCOL,
            context.run.run_id,
            namespace_of(context.config),
            namespace_without_kernels(context.config),
            facts_text(context.config),
            records,
            self._adapters.served() if self._adapters else [],
            self._orders.of(greeting.run),
            msgspec.json.encode(_handed_over(context.config)) if greeting.wants_model else b"",
            context.run.model_path.read_bytes() if greeting.wants_model else b"",
        )

    def _take_body(self, peer: Peer, body: Body) -> None:
        match body:
            case Forward():
                self._forward(peer, body)
            case Drop(replica, abort):
                self._check_replica(replica)
                if len(abort.request_id) > MAX_NAME_CHARACTERS:
                    raise WrongFrameError("an id that is too long")
                self._close_sequence(peer, abort.request_id)
                abort.request_id = f"{peer.run}.{abort.request_id}"
                self._to_schedulers[replica].post(abort)
            case Leave(tokenizer):
                self._abort(peer, [name for name, open_ in peer.open.items() if open_.tokenizer == tokenizer])
            case Piece() if self._files is not None:
                if len(body.data) > MAX_PIECE_BYTES:
                    raise WrongFrameError(f"a piece of {len(body.data)} bytes, the limit is {MAX_PIECE_BYTES}")
                self._files.take(peer.run, body)
                if not body.data:
                    self._unpark()
            case Ask():
                reply = self._orders.begin(peer.run, body)
                if reply is not None:
                    self._send(peer, Answer(reply))
            case Beat():
                peer.is_report_due = True
            case Goodbye():
                self._end(peer, "")
            case _:
                raise WrongFrameError(f"a {type(body).__name__} does not come from a router")

    def _forward(self, peer: Peer, body: Forward) -> None:
        self._check_replica(body.replica)
        check_names(body.request)
        try:
            check_request(body.request, self.context.config, self._vocab_size)
        except RequestError as error:
            self._refuse(peer, body.request, 400, f"its engine cannot take the request: {error.message}")
            return
        request = from_wire(body.request, time.monotonic_ns())
        shared, wanted = request.shared, request.shared.options.adapter
        options = msgspec.structs.replace(shared.options, adapter=self._adapter_of(wanted))
        request.shared = msgspec.structs.replace(shared, options=options)
        keys = tuple(item.unit_hashes[0] for item in shared.media)
        num_bytes = len(encode(request))
        status, message = 404, "its engine has not loaded the adapter; load it through the router"
        if wanted is None or options.adapter is not None:
            status, message = self._why_not(peer, request, num_bytes, self._outboxes[body.replica].max_record_bytes)
        files: list[bytes] = []
        if self._files is not None and keys and not message:
            status = 429
            files, message = self._files.begin(peer.run, shared.media, len(request.sequences))
        if message:
            self._refuse(peer, request, status, message)
            return
        for own in request.sequences:
            self._close_sequence(peer, own.request_id)
            size = num_bytes // len(request.sequences)
            peer.open[own.request_id] = OpenSequence(body.replica, request.tokenizer, own.attempt, size, keys)
            peer.num_open_bytes += size
        for key in files:
            self._send(peer, Want(key))
        if keys:
            self._parked.append(ParkedRequest(peer.run, body.replica, request, keys))
            self._unpark()
        else:
            self._pass_on(peer.run, body.replica, request)

    def _pass_on(self, run: str, replica: int, request: Request) -> None:
        """Give a request of a router to a scheduler."""
        shared = request.shared
        shared = msgspec.structs.replace(shared, key=f"{run}.{shared.key}", api=f"{run}.{shared.api}", pinned_replica=-1)
        sequences = [
            msgspec.structs.replace(
                own, request_id=f"{run}.{own.request_id}", group_id=f"{run}.{own.group_id}" if own.group_id else ""
            )
            for own in request.sequences
        ]
        self._to_schedulers[replica].post(Request(self.context.name, shared, request.prompts, sequences))
        self._is_report_due = True

    def _unpark(self) -> None:
        """Pass on requests whose files are known by now, and refuse those whose files cannot be used."""
        parked, self._parked = self._parked, []
        for each in parked:
            peer, request = self._runs.get(each.run), each.request
            if peer is None or self._files is None:
                continue
            open_ = [own for own in request.sequences if _is_open(peer, own)]
            request = Request(request.tokenizer, request.shared, request.prompts, open_)
            refusal = self._files.refusal(each.keys) if open_ else None
            items = self._files.found(each.keys) if open_ and refusal is None else None
            if refusal is not None:
                self._refuse(peer, request, refusal.status, refusal.message, refusal.code)
            elif items is not None:
                request.shared = msgspec.structs.replace(request.shared, media=items)
                self._pass_on(each.run, each.replica, request)
            elif open_:
                self._parked.append(each)

    def _refuse(self, peer: Peer, request: Request, status: int, message: str, code: str = "") -> None:
        for own in request.sequences:
            self._close_sequence(peer, own.request_id)
            rejected = Rejected(own.request_id, own.attempt, request.shared.api, status, message, code)
            self._send(peer, Refusal(request.tokenizer, rejected))

    def _adapter_of(self, use: AdapterUse | None) -> AdapterUse | None:
        """Return this engine's adapter with the contents of a router's; None: it has none."""
        served = self._adapters.served() if self._adapters and use is not None else []
        return next((each.use for each in served if use is not None and each.contents == use.contents), None)

    def _why_not(self, peer: Peer, request: Request, num_bytes: int, max_bytes: int) -> tuple[int, str]:
        """Return status and cause if a request, of `num_bytes` in a ring, cannot be taken; an empty cause: it can."""
        sampling, limit = request.shared.sampling, self.context.config.max_logprobs
        if max(sampling.num_logprobs, sampling.num_prompt_logprobs) > limit:
            return 400, f"logprobs: its engine gives at most {limit}; start all engines with the same --max-logprobs"
        if num_bytes > max_bytes:
            return 400, f"the tokenized request takes {num_bytes} bytes, the limit of its engine is {max_bytes}; shorten it"
        if len(peer.open) + len(request.sequences) > MAX_OPEN or peer.num_open_bytes + num_bytes > MAX_OPEN_BYTES:
            return 429, f"its engine has {len(peer.open)} open sequences of this router, which is the limit; try again later"
        return 0, ""

    def _close_sequence(self, peer: Peer, request_id: str) -> OpenSequence | None:
        """Forget a sequence; return what was known of it."""
        open_ = peer.open.pop(request_id, None)
        if open_ is not None:
            peer.num_open_bytes -= open_.num_bytes
            if self._files is not None:
                self._files.end(open_.files)
        return open_

    def _check_replica(self, replica: int) -> None:
        if replica not in range(len(self._replicas)):
            raise WrongFrameError(f"replica {replica}, this engine has {len(self._replicas)}")

    # -------------------------------------------------------------------------------------------------- to the routers

    def _report(self) -> None:
        """Answer heartbeats, and tell all routers when the schedulers have taken new requests."""
        are_taken = self._are_taken  # before the gauges are read, which then show them
        is_for_all = self._is_report_due and are_taken
        due = [peer for peer in self._peers.values() if is_for_all or peer.is_report_due]
        if not due:
            return
        self._is_report_due = self._is_report_due and not are_taken
        if self._look_at_versions():
            return
        loads = [gauges.load() for gauges in self._replicas]
        for peer in due:
            peer.is_report_due = False
            if are_taken:
                peer.taken = peer.seen
            self._send(peer, Report(peer.seen, peer.taken, len(peer.open), loads))

    def _forget_silent(self, now_ns: int) -> None:
        self._next_look_ns = now_ns + LOOK_INTERVAL_NS
        self._orders.forget(now_ns)
        for peer in list(self._peers.values()):
            if now_ns - peer.heard_ns > FORGET_NS:
                self._end(peer, f"nothing was heard from it for {FORGET_NS // 1_000_000_000} s")

    def _look_at_versions(self) -> bool:
        """Return whether other weights are in use than the routers know; then their sessions are ended."""
        are_other = self._versions_in_use() != self._versions
        if are_other:
            self._weights_changed()
        return are_other

    def _weights_changed(self) -> None:
        """End all sessions: the routers continue their streams where the earlier weights are."""
        self._weights()
        for peer in list(self._peers.values()):
            self._end(peer, "its weights have changed")

    def _weights(self) -> list[WeightsRecord]:
        """Read the weights of each replica, and note what is read."""
        self._versions = self._versions_in_use()
        records = [self.context.run.weights(scheduler) for scheduler in self.context.schedulers]
        self._known_versions = {0}.union(*(record.contents for record in records))
        return records

    def _versions_in_use(self) -> list[int]:
        """Return the version of the weights of each replica; 0: they are not in memory."""
        return [int(gauges.version.value) for gauges in self._replicas]

    def _answer_orders(self) -> int:
        num_done = self._orders.receive(time.monotonic_ns())
        if num_done:
            self._look_at_versions()  # then the answer comes in the next session
        for peer in list(self._peers.values()):
            for reply in self._orders.answers(peer.run):
                self._send(peer, Answer(reply))
        return num_done

    @property
    def _are_taken(self) -> bool:
        """Whether the schedulers have taken all requests."""
        return not any(map(len, self._to_schedulers)) and not any(outbox.fill_bytes for outbox in self._outboxes)

    def _tell_prefixes(self) -> None:
        for index, cached in enumerate(self._cached):
            change = cached.change() if self._peers else None
            if change is not None:
                for peer in list(self._peers.values()):
                    self._send(peer, Prefixes(index, False, *change))

    def _send(self, peer: Peer, body: Body) -> None:
        peer.sent += 1
        frame = encode_frame(peer.sent, body)
        peer.kept.append(frame)
        peer.num_kept_bytes += len(frame)
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        """Send what a router has not got yet, as far as it reads."""
        while peer.kept:
            try:
                self._socket.send_multipart([peer.identity, peer.kept[0]], zmq.NOBLOCK)
            except zmq.Again:
                if len(peer.kept) > MAX_KEPT_FRAMES or peer.num_kept_bytes > MAX_KEPT_BYTES:
                    self._end(peer, "it does not read")
                return
            except zmq.ZMQError:  # EHOSTUNREACH: its connection is gone
                self._end(peer, "")
                return
            frame = peer.kept.popleft()
            peer.num_kept_bytes -= len(frame)
            self._sent_bytes.add(len(frame))

    def _say_goodbye(self, identity: bytes, seq: int, reason: str) -> None:
        """Send the last frame of a session, or the only one of a connection without, if it can be."""
        try:
            self._socket.send_multipart([identity, encode_frame(seq, Goodbye(reason[:1000]))], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._dropped.add(1)

    def _end(self, peer: Peer, reason: str) -> None:
        """End a session and abort its sequences; `reason` is sent, if it can be."""
        if self._peers.pop(peer.identity, None) is None:
            return
        del self._runs[peer.run]
        self._ended.append(peer.identity)
        self._num_ended.add(1)
        self._num_routers.set(len(self._peers))
        self.context.log.info("the session of router %s has ended%s", peer.run, f": {reason}" if reason else "")
        self._abort(peer, list(peer.open))
        if self._files is not None:
            self._files.router_left(peer.run)
            self._unpark()
        if reason and not peer.kept:
            self._say_goodbye(peer.identity, peer.sent + 1, reason)
        peer.kept.clear()

    def _abort(self, peer: Peer, request_ids: list[str]) -> None:
        for request_id in request_ids:
            open_ = self._close_sequence(peer, request_id)
            assert open_ is not None
            self._to_schedulers[open_.scheduler].post(Abort(f"{peer.run}.{request_id}", open_.attempt))


def _is_open(peer: Peer, own: SequencePart) -> bool:
    open_ = peer.open.get(own.request_id)
    return open_ is not None and open_.attempt == own.attempt


def _handed_over(config: EngineConfig) -> EngineConfig:
    """Return the configuration without what concerns only this engine's own clients and its key."""
    nothing: dict[str, Any] = {"api_key": (), "api_key_priority": (), "admin_key": "", "cluster_key_file": ""}
    return msgspec.structs.replace(without_secrets(config), **nothing)
