"""The api actor: an event loop with a listening socket on one side and the mailbox on the other.

One process per `--api-processes`, all listening on one port (SO_REUSEPORT). Owns the sockets and, through
`client.EngineClient`, its open requests. A thread sleeps on the mailbox's futex and wakes the event loop; everything else
happens in the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from api.admission import MAX_SURPLUS, Admission
from api.app import App
from api.batches.runner import BatchRunner
from api.body_budget import BodyBudget
from api.client.client import EngineClient
from api.client.generation import Generation
from api.connection import Connection
from api.files.store import FileStore
from api.fingerprint import Fingerprints
from api.json_body import BodyDecoder, DecodingLimits
from api.media.request import MediaRequests
from api.media.store import MediaStore
from api.model import ServedModel
from api.prometheus import Renderings
from api.request_context import Services
from api.responses.background import BackgroundResponses, Writer
from api.responses.store import ResponseStore, StoredRequest, StoredResponse
from api.tls_listener import SecureConnection, TlsListener
from api.watch import Watch
from engine.checkpoint.record import ModelRecord
from engine.errors import StartError
from engine.messages import AbortRequest, Command, Message, Prepared, Reply
from engine.process.actor import LOOK_INTERVAL_NS, Actor, ActorLoop, end_start
from engine.process.context import ActorContext
from engine.process.control_client import ControlClient
from engine.process.mailbox_waiter import MailboxWaiter
from shm.counters import State

if TYPE_CHECKING:
    from api.request_log import RequestLog
    from api.spans import Spans

KEEP_ALIVE_S = 30
BACKLOG = 2048
MAX_GRACE_S = 3.0  # for open streams after SIGTERM; then they end with an error
SPARE_DESCRIPTORS = 384  # for fetched links, files and sockets of the engine


class ApiActor(Actor):
    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self.client = EngineClient(context)
        self._media = MediaStore(context) if context.config.media_processes else None
        self._loop = ActorLoop(self)
        self._stop_ns = 0
        self._spans: Spans | None = None

    # ----------------------------------------------------------------------------------------------------------- hooks

    def on_start(self) -> None:
        config = self.context.config
        record = ModelRecord.of_run(self.context.run.model_path)
        if config.otlp_traces_endpoint:
            from api.spans import Spans

            self._spans = Spans(self.context, self.client.adapters)
        model = ServedModel.of(config, record, self.client.adapters)
        num_connections, num_spare = connections_that_fit(config.max_connections)
        if num_connections < config.max_connections:
            self.context.log.warning(
                (
                    "limited connections to %d instead of --max-connections %d: the process may open only %d files; "
                    "raise `ulimit -n`"
                ),
                num_connections,
                config.max_connections,
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
        fingerprints = Fingerprints(config, self.context.run)
        responses = ResponseStore(self.context.run.responses_path)
        self._background = BackgroundResponses(self.context, responses)
        files = FileStore(self.context.run.files_path, config.max_files_size, config.max_files_size_per_user)
        self._batches = BatchRunner(self.context, files)
        services = Services(
            self.context,
            self.client,
            model,
            ControlClient(self.context.run),
            BodyDecoder(DecodingLimits(max_element_bytes=config.max_body_bytes) if self._media else DecodingLimits()),
            BodyBudget(config.max_body_bytes),
            MediaRequests(self.context, self._media, model.media_kinds, 2 * num_spare // 3),
            Watch(self.context),
            Renderings(self.context, model, fingerprints),
            fingerprints,
            {type(each): each for each in (responses, self._background, files, self._batches)},
            self._request_log(),
            self._spans,
        )
        inherited = self.context.listener_fd
        listener = socket.socket(fileno=inherited) if inherited >= 0 else listening_socket(config.host, config.port)
        self._sockets = [listener]
        Connection.admission = Admission(
            num_connections, config.max_connections_per_address, config.trusted_proxies, config.root_path
        )
        self._background.reopen = partial(_reopened, services)
        app = App(services)
        self._batches.ask = app.ask
        tls = None
        if config.ssl_certfile:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=SecureConnection if tls else Connection,
                ws="none",
                loop="uvloop",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,
            ),
            self.context.announce_ready,
            tls,
        )

    def _request_log(self) -> RequestLog | None:
        if not self.context.config.log_requests:
            return None
        from api.request_log import RequestLog

        return RequestLog(self.context.log)

    def on_message(self, sender: str, message: Message) -> None:
        if isinstance(message, Prepared):
            assert self._media is not None
            self._media.on_prepared(message)
        else:
            self.client.on_message(message)

    def on_command(self, command: Command) -> Reply | None:
        if not isinstance(command.order, AbortRequest):
            return super().on_command(command)
        if self.client.abort(command.order.request_id):
            return Reply(command.command_id)
        return Reply(command.command_id, 404, f"{self.context.name} has no open request {command.order.request_id}")

    def on_peer(self, name: str, epoch: int) -> None:
        self.client.on_peer(name)
        if self._media is not None:
            self._media.on_peer(name)

    # ------------------------------------------------------------------------------------------------------------ life

    def run(self) -> None:
        self.context.row.set_state(State.LOADING)
        self.on_start()
        end_start()
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        finally:
            loop.close()
            if self._spans is not None:
                self._spans.close()

    async def _serve(self) -> None:
        """Serve until the server has ended: every 100 ms write the heartbeat, check the peers, and do what is due."""
        self._failure = asyncio.get_running_loop().create_future()
        with self._mail():
            server = asyncio.create_task(self._server.serve(self._sockets))
            while not server.done():
                self._loop.turn()
                now_ns = time.monotonic_ns()
                self.client.on_tick(now_ns)
                self._background.on_tick(now_ns)
                self._batches.on_tick(now_ns)
                if self._media is not None:
                    self._media.flush()
                if self.context.is_stopping:
                    self._end(now_ns)
                else:
                    self._show_state()
                await asyncio.wait({server, self._failure}, timeout=LOOK_INTERVAL_NS / 1e9, return_when=asyncio.FIRST_COMPLETED)
                if self._failure.done():
                    self._failure.result()
            server.result()

    @contextlib.contextmanager
    def _mail(self) -> Iterator[None]:
        """Take mail in the event loop within the block."""
        loop = asyncio.get_running_loop()

        def take() -> None:
            self._on_mail()
            waiter.resume()

        waiter = MailboxWaiter(self.context.mailbox, lambda: loop.call_soon_threadsafe(take))
        try:
            yield
        finally:
            waiter.close()

    def _on_mail(self) -> None:
        """Handle a limited number of messages; the waiter calls again at once if there are more, and requests get their turn in
        between."""
        try:
            self._loop.turn()
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)

    def _show_state(self) -> None:
        """Show RUNNING while sequences are open."""
        if self._server.started:
            self.context.row.set_state(State.RUNNING if self.client.num_open else State.READY)

    def _end(self, now_ns: int) -> None:
        """Stop after SIGTERM: no new connections and requests. Open streams get a short time to end, then they end with an
        error, and clients that do not read that are disconnected."""
        if not self._stop_ns:
            self._stop_ns = now_ns
            self.context.row.set_state(State.DRAINING)
            self.client.stop(grace=True)
            self._batches.stop()
            self._server.should_exit = True
        grace_ns = int(min(MAX_GRACE_S, self.context.config.stop_timeout_s / 3) * 1e9)
        if now_ns - self._stop_ns > grace_ns:
            self._background.stop()
            self.client.stop(grace=False)
        if now_ns - self._stop_ns > 2 * grace_ns:
            self._server.cut_connections()


async def _reopened(services: Services, stored: StoredResponse, asked: StoredRequest) -> tuple[Generation, Writer]:
    from api.responses.takeover import opened  # only needed when a process has died

    return await opened(services, stored, asked)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: an actor's signals are handled by `engine.process.main`."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None], tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._tls = tls
        self._listeners: list[TlsListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([] if self._tls else sockets)
        if self._tls is not None:
            self._listeners = [
                TlsListener(listener, self.config.backlog, self._tls, self._secure_connection, self.server_state)
                for listener in sockets or ()
            ]
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)

    def _secure_connection(self) -> SecureConnection:
        return SecureConnection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.transport.abort()


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the port that all api processes share. The supervisor holds the port, so no other program can
    have it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may be in TIME_WAIT
        bound.bind(address)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    return bound


def connections_that_fit(max_connections: int) -> tuple[int, int]:
    """Return how many connections this process can have open, at most `max_connections`, and how many descriptors are then left
    for the rest. Raises the soft limit of open files as needed and allowed."""
    num_open = len(os.listdir("/proc/self/fd"))
    allow_descriptors(num_open + max_connections + MAX_SURPLUS + SPARE_DESCRIPTORS)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_free = max(soft - num_open - MAX_SURPLUS, 2) if soft != resource.RLIM_INFINITY else max_connections + SPARE_DESCRIPTORS
    num_spare = min(SPARE_DESCRIPTORS, max(1, num_free // 3))
    return max(1, min(max_connections, num_free - num_spare)), num_spare


def allow_descriptors(wanted: int) -> None:
    """Raise the soft limit of open files as needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
