"""The link of a router: it stands for the schedulers of all engines.

    tokenizers  Request, Abort        ->  lanes of a place  ->  Forward, Drop       the engine that has this place
    tokenizers  Outputs, Rejected     <-  link              <-  Results, Refusal    any engine

Each replica of an engine has a place: a row `scheduler<k>` of the actor table with gauges and fingerprints, which the link
writes. A session that ends is the next epoch of its places, by which the api submits what was open there again, as after the
death of a scheduler on this machine. The link keeps no request: what reaches a place without a session is dropped, and the
place gets its next epoch as soon as any place is ready.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable

import zmq

from engine.cluster.answer_check import check_outputs, check_refusal, check_reply, check_report, check_welcome
from engine.cluster.frames import (
    PROTOCOL,
    Answer,
    Ask,
    Beat,
    Body,
    Drop,
    FarewellError,
    Forward,
    Goodbye,
    Greeting,
    Leave,
    Prefixes,
    Refusal,
    Report,
    Results,
    Want,
    Welcome,
    WrongFrameError,
    decode_frame,
    encode_frame,
    to_wire,
)
from engine.cluster.key import read_key_file
from engine.cluster.membership import Address, membership_of
from engine.cluster.place import Place
from engine.cluster.remote_engine import RemoteEngine, Session
from engine.cluster.router_files import MAX_KNOWN, RouterFiles
from engine.cluster.router_orders import RouterOrders
from engine.cluster.sockets import LinkPoller, Socket, dealer
from engine.cluster.versions import Versions
from engine.cluster.vocabulary import vocab_size_of
from engine.errors import OptionError
from engine.messages import (
    Abort,
    Command,
    EngineRecord,
    Message,
    Output,
    Outputs,
    Rejected,
    ReloadWeights,
    Reply,
    Request,
    decode,
    encode,
)
from engine.metric_labels import ENGINE_STATES, EngineState
from engine.process.actor import Actor
from engine.process.context import ActorContext
from engine.process.outbox import BackloggedOutbox, earliest
from engine.process.topology import actors_of, ends_of, lane_of, role_of

BEAT_INTERVAL_NS = 100_000_000
LATE_NS = 2 * BEAT_INTERVAL_NS  # of silence, after which each heartbeat counts as missed
RETRY_INTERVAL_NS = 300_000_000  # between attempts to reach an engine
WRONG_INTERVAL_NS = 5_000_000_000  # until an engine that sent what is no frame is tried again
CONNECT_TIMEOUT_NS = 5_000_000_000  # for a connection and its Welcome
MAX_UNREAD_RECORDS = 1024  # for a tokenizer's ring; then nothing is read from engines
MAX_FRAMES_PER_TURN = 256
MAX_UNREAD_PIECES = 32  # and other frames that an engine has not read: requests do not wait behind whole files
_LINGER_MS = 200  # for a last frame


class RouterLink(Actor):
    """Connects the router to its engines until it ends."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        config = context.config
        self._keys = read_key_file(config.cluster_key_file) if config.cluster_key_file else None
        self._list = membership_of(config.engines)
        self._zmq: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._poller = LinkPoller(context.mailbox)
        self._places = [Place(context, index) for index in range(len(context.schedulers))]
        self._free = deque(self._places)
        self._engines: dict[Address, RemoteEngine] = {}
        self._at_place: dict[int, tuple[RemoteEngine, int]] = {}  # engine and replica
        self._tokenizers = actors_of("tokenizer", context.peers())
        outboxes = {name: context.outbox(name) for name in self._tokenizers}
        self._to_tokenizers = {name: BackloggedOutbox(outbox.send_bytes) for name, outbox in outboxes.items()}
        self._max_record_bytes = min(outbox.max_record_bytes for outbox in outboxes.values())
        self._vocab_size = vocab_size_of(context.run)
        self._versions = Versions(context.run.weights(place.name) for place in self._places)
        self._contents = ""  # of the weights that new requests get
        self._files = RouterFiles(context) if context.config.media_processes else None
        self._orders = RouterOrders(context, self._ask, self._note_trouble)
        self._sessions = context.epoch << 32  # number of the last session
        self._next_beat_ns = 0
        self._num_engines = {state: context.counter("router_engines", state=state) for state in ENGINE_STATES}
        self._records: list[EngineRecord] = []
        self._num_missed = context.counter("link_missed_heartbeats_total")
        self._received_bytes = context.counter("link_received_bytes_total")
        self._sent_bytes = context.counter("link_sent_bytes_total")
        self._num_ended = context.counter("link_sessions_ended_total")

    def on_start(self) -> None:
        for place in self._places:
            place.lose("link")  # also what an earlier life of this link had there
        for record in self.context.run.engines():
            for index in record.places:
                self._places[index].holder = record.address

    # ------------------------------------------------------------------------------------------------------ the loop

    def wait(self, timeout_ns: int) -> None:
        self._poller.wait(timeout_ns)

    def do_work(self) -> int:
        now_ns = time.monotonic_ns()
        self._look_at_list(now_ns)
        num_done = sum(outbox.flush() for outbox in self._to_tokenizers.values())
        is_beat = now_ns >= self._next_beat_ns
        if is_beat:
            self._next_beat_ns = now_ns + BEAT_INTERVAL_NS
            self._count_engines()
        for engine in list(self._engines.values()):
            num_done += self._serve(engine, now_ns, is_beat=is_beat)
        if self._orders.advance(self._engines.values(), now_ns):
            for engine in self._engines.values():
                engine.is_away = False
            self._choose_weights()
        self._rescue()
        return num_done

    def deadline_ns(self) -> int:
        waiting_ns = earliest(*(outbox.deadline_ns() for outbox in self._to_tokenizers.values()))
        sessions = [engine.session for engine in self._engines.values() if engine.session is not None]
        kept_ns = time.monotonic_ns() + 2_000_000 if any(session.kept for session in sessions) else 0
        return earliest(waiting_ns, kept_ns, self._next_beat_ns)

    def on_stop(self) -> None:
        for engine in self._engines.values():
            if engine.session is not None:
                self._close(engine.session)
        self._poller.close()
        self._zmq.term()

    # ---------------------------------------------------------------------------------------------- from the tokenizers

    def on_record(self, sender: str, record: bytes) -> Message:
        tokenizer, index = ends_of(sender)
        message = decode(record)
        engine, replica = self._at_place.get(index, (None, 0))
        session = engine.session if engine is not None and engine.is_welcome else None
        if isinstance(message, Request):
            if engine is None or session is None:
                self._places[index].strand("no engine")
                return message
            if self._files is not None:
                self._files.note(session, message.shared.media)
            self._send(engine, session, Forward(replica, to_wire(message, time.monotonic_ns())))
            session.unseen.append((session.sent, replica, len(message.sequences)))
            session.last_forward, session.is_idle = session.sent, False
            self._show(engine, session)
        elif isinstance(message, Abort):
            if engine is not None and session is not None:
                self._send(engine, session, Drop(replica, message))
        else:
            raise AssertionError(f"unexpected {type(message).__name__} from {tokenizer}")
        return message

    def on_peer(self, name: str, epoch: int) -> None:
        """A tokenizer that restarted knows none of its sequences."""
        if role_of(name) != "tokenizer":
            return
        self._to_tokenizers[name].clear()
        for engine in self._engines.values():
            if engine.session is not None and engine.session.is_welcome:
                self._send(engine, engine.session, Leave(name))

    # -------------------------------------------------------------------------------------------- from the operator

    def on_command(self, command: Command) -> Reply | None:
        return self._orders.begin(command, self._engines.values())

    def _ask(self, engine: RemoteEngine, ask: Ask) -> None:
        """Send an order to an engine. Before it loads other weights, streams that need not wait for them move to an engine
        with the present ones."""
        session, order = engine.session, ask.order
        assert session is not None
        session.orders.add(ask.command_id)
        if isinstance(order, ReloadWeights):
            engine.is_away = True
            for place in engine.places:
                place.quiet()
            versions = {place.weight_version for place in self._places if place.is_ready}
            for place in engine.places if order.mode == "requeue" else ():
                if place.weight_version in versions:
                    place.strand("weights")
        self._send(engine, session, ask)

    # -------------------------------------------------------------------------------------------------- the list

    def _look_at_list(self, now_ns: int) -> None:
        try:
            addresses = self._list.changed(now_ns)
        except OptionError as error:
            self._report(str(error))
            return
        if addresses is None:
            return
        for address in addresses:
            engine = self._engines.setdefault(address, RemoteEngine(address))
            engine.is_leaving_ns = 0
        for engine in self._engines.values():
            if engine.address not in addresses and not engine.is_leaving_ns:
                engine.is_leaving_ns = now_ns
                self.context.log.info("engine %s left the list: it gets nothing new", engine.address)

    def _retire(self, engine: RemoteEngine, now_ns: int) -> None:
        """Forget an engine that left the list once nothing is open there, or its streams had their time."""
        drain_ns = int(self.context.config.drain_timeout_s * 1e9)
        session = engine.session
        if session is not None:
            if session.is_welcome and not session.is_idle and now_ns - engine.is_leaving_ns < drain_ns:
                return
            self._end(engine, "it left the list", "drain")
        self._give_back(engine)
        del self._engines[engine.address]

    def _give_back(self, engine: RemoteEngine) -> None:
        for place in engine.places:
            del self._at_place[place.index]
            self._free.append(place)
        engine.places = []

    # -------------------------------------------------------------------------------------------------- sessions

    def _serve(self, engine: RemoteEngine, now_ns: int, *, is_beat: bool) -> int:
        """Do what is due for an engine; return how many frames it sent."""
        if engine.is_leaving_ns:
            self._retire(engine, now_ns)
        session = engine.session
        if session is None:
            if now_ns >= engine.next_attempt_ns and engine.address in self._engines:
                self._begin(engine, now_ns)
            return 0
        num_done = 0
        try:
            num_done = self._receive(engine, session)
        except WrongFrameError as error:
            self._end(engine, str(error))
            if not isinstance(error, FarewellError):
                engine.next_attempt_ns = now_ns + WRONG_INTERVAL_NS
        if engine.session is session and self._has_failed(session):
            self._end(engine, "the connection is closed" if session.is_welcome else "it cannot be reached", "connection")
        if engine.session is not session:
            return num_done
        self._flush(engine, session)
        silence_ns = time.monotonic_ns() - session.heard_ns
        limit_ns = int(self.context.config.peer_timeout_s * 1e9) if session.is_welcome else CONNECT_TIMEOUT_NS
        if silence_ns > limit_ns:
            seconds = self.context.config.peer_timeout_s
            self._end(
                engine, f"nothing was heard for {seconds:g} s" if session.is_welcome else "it cannot be reached", "silence"
            )
        elif session.is_welcome and silence_ns > self.context.config.peer_silence_s * 1e9:
            for place in engine.places:
                place.quiet()
        if engine.session is session and is_beat and session.is_welcome:
            self._num_missed.add(silence_ns > LATE_NS)
            self._send(engine, session, Beat())
        return num_done

    def _begin(self, engine: RemoteEngine, now_ns: int) -> None:
        engine.next_attempt_ns = now_ns + RETRY_INTERVAL_NS
        self._sessions += 1
        socket = dealer(self._zmq, self._keys)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        events |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        monitor = socket.get_monitor_socket(events)
        socket.connect(engine.address.endpoint)
        engine.session = Session(socket, monitor, now_ns)
        self._poller.add(socket)
        self._poller.add(monitor)

    def _has_failed(self, session: Session) -> bool:
        """Take the events of a connection; return whether it is closed. Once it is open, greet."""
        from zmq.utils.monitor import recv_monitor_message

        while session.monitor.poll(0):
            event = recv_monitor_message(session.monitor)["event"]
            if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            session.heard_ns = time.monotonic_ns()
            session.sent = 1
            greeting = Greeting(PROTOCOL, self.context.run.run_id, self._sessions)
            session.kept.append(encode_frame(1, greeting))
        return False

    def _end(self, engine: RemoteEngine, reason: str, cause: str = "session") -> None:
        """End the session with an engine: what is open there is stranded until another replica, or the next session, is
        there. An idle engine has sent all results, which may still be on their way to clients."""
        session = engine.session
        assert session is not None
        if session.is_welcome:
            self._num_ended.add(1)
            for place in engine.places:
                place.lose(cause, has_open=not session.is_idle)
        if session.is_held:
            for place in engine.places:
                self._hold(place, is_held=False)
        engine.session = None
        self._choose_weights()
        engine.next_attempt_ns = time.monotonic_ns() + (0 if session.is_welcome else RETRY_INTERVAL_NS)
        self._close(session, reason)
        self._note_trouble(engine, reason)

    def _close(self, session: Session, reason: str = "the router stops") -> None:
        if session.is_welcome and not session.kept:
            with contextlib.suppress(zmq.ZMQError):  # the engine finds out by itself
                session.socket.send(encode_frame(session.sent + 1, Goodbye(reason)), zmq.NOBLOCK)
        self._poller.remove(session.socket)
        self._poller.remove(session.monitor)
        session.socket.disable_monitor()
        session.monitor.close(0)
        session.socket.close(_LINGER_MS)

    def _rescue(self) -> None:
        """Have what is stranded submitted again, if any replica takes it."""
        stranded = [place for place in self._places if place.is_stranded]
        if stranded and any(place.is_ready for place in self._places):
            for place in stranded:
                place.rescue()

    def _count_engines(self) -> None:
        records = [
            EngineRecord(
                str(engine.address), _state_of(engine), tuple(place.index for place in engine.places), engine.trouble[:1000]
            )
            for engine in self._engines.values()
        ]
        if records == self._records:
            return
        self._records = records
        states = [record.state for record in records]
        for state, cell in self._num_engines.items():
            cell.set(states.count(state))
        try:
            self.context.run.write_engines(records)
        except OSError as error:
            self._report(
                f"cannot write {self.context.run.engines_path}: {error.strerror}; `tokamak ctl engines` shows nothing new"
            )

    # ------------------------------------------------------------------------------------------------------ frames

    def _receive(self, engine: RemoteEngine, session: Session) -> int:
        num_done = 0
        while num_done < MAX_FRAMES_PER_TURN and engine.session is session and self._are_read:
            try:
                data = session.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            num_done += 1
            self._received_bytes.add(len(data))
            body = decode_frame(data, session.seen)
            session.seen += 1
            if isinstance(body, Report) or not session.loads:  # results alone do not show that the engine hears this router
                session.heard_ns = time.monotonic_ns()
            self._take(engine, session, body)
        return num_done

    @property
    def _are_read(self) -> bool:
        """Whether the tokenizers keep up."""
        return all(len(outbox) < MAX_UNREAD_RECORDS for outbox in self._to_tokenizers.values())

    def _take(self, engine: RemoteEngine, session: Session, body: Body) -> None:
        if not session.is_welcome and not isinstance(body, (Welcome, Goodbye)):
            raise WrongFrameError(f"a {type(body).__name__} before its welcome")
        match body:
            case Results(tokenizer, outputs) if tokenizer in self._to_tokenizers:
                check_outputs(outputs, self._vocab_size)
                _translate(outputs, session.versions)
                self._pass_on(tokenizer, Outputs(outputs))
            case Refusal(tokenizer, rejected) if tokenizer in self._to_tokenizers:
                check_refusal(rejected)
                self._pass_on(tokenizer, rejected)
            case Report():
                self._take_report(engine, session, body)
            case Want(key) if self._files is not None:
                if len(session.uploads) >= MAX_KNOWN:
                    raise WrongFrameError(f"it wants more than {MAX_KNOWN} files at once")
                session.uploads.append(self._files.pieces(session, key))
            case Answer(reply):
                check_reply(reply)
                engine.is_away = False
                self._orders.take(engine, reply)
            case Prefixes():
                self._take_prefixes(engine, body)
            case Welcome():
                self._welcomed(engine, session, body)
            case Goodbye(reason):
                raise FarewellError(reason)
            case _:
                raise WrongFrameError(f"a {type(body).__name__} that no engine sends")

    def _pass_on(self, tokenizer: str, message: Outputs | Rejected) -> None:
        record = encode(message)
        if len(record) > self._max_record_bytes:
            raise WrongFrameError(f"{len(record)} bytes of results, the limit is {self._max_record_bytes}")
        self._to_tokenizers[tokenizer].post_records([record])

    def _welcomed(self, engine: RemoteEngine, session: Session, welcome: Welcome) -> None:
        if welcome.protocol != PROTOCOL or session.is_welcome:
            raise WrongFrameError(f"it speaks protocol {welcome.protocol}, expected {PROTOCOL}")
        self._check_namespace(welcome)
        check_welcome(welcome)
        num_replicas = len(welcome.records)
        if len(engine.places) != num_replicas:
            self._give_back(engine)
            if num_replicas > len(self._free):
                raise WrongFrameError(
                    f"it has {num_replicas} replicas, and {len(self._free)} of --max-engines {len(self._places)} places "
                    "are free; start the router with more"
                )
            own = str(engine.address)
            free = sorted(self._free, key=lambda place: place.holder != own)  # the same as before, so that its counts go on
            engine.places = free[:num_replicas]
            self._free = deque(place for place in self._free if place not in engine.places)
            for replica, place in enumerate(engine.places):
                self._at_place[place.index] = engine, replica
                place.holder = own
        namespace = "" if welcome.namespace == self.context.config.namespace else welcome.namespace
        for place, record in zip(engine.places, welcome.records, strict=True):
            translated, versions = self._versions.translated(record, namespace)
            session.versions |= versions
            self.context.run.write_weights(translated, place.name)
            place.take(translated.version)
        if all(version == own for version, own in session.versions.items()):
            session.versions = {}
        session.orders = set(welcome.orders)
        self._orders.met(engine, welcome.adapters, session.heard_ns)
        session.is_welcome = True
        engine.contents = welcome.records[0].contents[welcome.records[0].version]
        engine.trouble = ""
        self._choose_weights()
        self.context.log.info("engine %s is connected", engine.address)

    def _check_namespace(self, welcome: Welcome) -> None:
        config = self.context.config
        is_accepted = welcome.namespace == config.namespace
        if config.allow_mixed_kernels:
            is_accepted = welcome.namespace_without_kernels == config.namespace_without_kernels
        if not is_accepted:
            raise WrongFrameError(
                f"its answers would have other bytes: it has {welcome.facts}; this router's engines have "
                f"{config.namespace_facts}. Start it with the same model and options (--cpu-kernels too)"
            )

    def _choose_weights(self) -> None:
        """Choose the weights that new requests get: those in use as long as any engine has them."""
        found = [engine.contents for engine in self._engines.values() if engine.is_welcome]
        if found and self._contents not in found and not self._orders.are_weights_changing:
            self._contents = max(found, key=found.count)

    def _gets_requests(self, engine: RemoteEngine) -> bool:
        """Return whether an engine that is ready gets new requests."""
        if engine.is_leaving_ns or engine.is_away or engine.lacking:
            return False
        if engine.contents == self._contents or self._orders.are_weights_changing:
            return True
        trouble = "it has other weights than the others, so it gets nothing new; load the same weights in all engines"
        self._note_trouble(engine, trouble)
        return False

    def _note_trouble(self, engine: RemoteEngine, trouble: str) -> None:
        if engine.trouble != trouble:
            engine.trouble = trouble
            self._report(f"engine {engine.address}: {trouble}")

    def _take_report(self, engine: RemoteEngine, session: Session, report: Report) -> None:
        if len(report.loads) != len(engine.places):
            raise WrongFrameError(f"it reports {len(report.loads)} replicas, not {len(engine.places)}")
        check_report(report, session.sent)
        session.loads, session.received = report.loads, report.received
        session.is_idle = not report.num_open and report.received >= session.last_forward
        while session.unseen and session.unseen[0][0] <= report.taken:
            session.unseen.popleft()
        for place, load in zip(engine.places, report.loads, strict=True):
            if place.epoch not in (0, load.epoch):  # its scheduler was restarted and knows nothing of before
                place.strand("scheduler")
            place.epoch = load.epoch
        self._show(engine, session)

    def _show(self, engine: RemoteEngine, session: Session) -> None:
        gets_requests = self._gets_requests(engine)
        for replica, (place, load) in enumerate(zip(engine.places, session.loads, strict=False)):
            num_sent = sum(count for _, own, count in session.unseen if own == replica)
            place.show(load, num_sent, is_ready=load.is_ready and gets_requests)

    def _take_prefixes(self, engine: RemoteEngine, change: Prefixes) -> None:
        if change.replica not in range(len(engine.places)):
            raise WrongFrameError(f"replica {change.replica}, it has {len(engine.places)}")
        prefixes = engine.places[change.replica].prefixes
        if change.is_whole:
            prefixes.clear()
        prefixes.remove_all(_words(change.removed))
        prefixes.add_all(_words(change.added))

    def _send(self, engine: RemoteEngine, session: Session, body: Body) -> None:
        session.sent += 1
        session.kept.append(encode_frame(session.sent, body))
        self._flush(engine, session)

    def _flush(self, engine: RemoteEngine, session: Session) -> None:
        """Send as much as fits; while frames are left, the lanes of the engine's places keep theirs."""
        while session.kept or self._next_piece(session):
            try:
                session.socket.send(session.kept[0], zmq.NOBLOCK)
            except zmq.Again:
                break
            self._sent_bytes.add(len(session.kept.popleft()))
        if session.is_held != bool(session.kept):
            session.is_held = bool(session.kept)
            for place in engine.places:
                self._hold(place, is_held=session.is_held)

    def _next_piece(self, session: Session) -> bool:
        """Put the next piece of a file behind the last frame; return whether there was one. Files take turns."""
        while session.uploads and session.sent - session.received < MAX_UNREAD_PIECES:
            upload = session.uploads.popleft()
            piece = next(upload, None)
            if piece is not None:
                session.uploads.append(upload)
                session.sent += 1
                session.kept.append(encode_frame(session.sent, piece))
                return True
        return False

    def _hold(self, place: Place, *, is_held: bool) -> None:
        for tokenizer in self._tokenizers:
            self.context.mailbox.hold(lane_of(tokenizer, place.name), is_held)

    def _report(self, text: str) -> None:
        self.context.log.warning("%s", text)
        self.context.counters.errors.record(self.context.name, text)


def _translate(outputs: list[Output], versions: dict[int, int]) -> None:
    """Replace an engine's version numbers of weights by the router's."""
    if versions:
        for output in outputs:
            output.weight_version = versions.get(output.weight_version, output.weight_version)


def _state_of(engine: RemoteEngine) -> EngineState:
    if not engine.is_welcome:
        return "gone"
    if engine.is_leaving_ns:
        return "leaving"
    return "ready" if any(place.is_ready for place in engine.places) else "quiet"


def _words(data: bytes) -> Iterable[int]:
    if len(data) % 8:
        raise WrongFrameError("fingerprints have 8 bytes each")
    return filter(None, memoryview(data).cast("Q"))
