"""A real api process between a test that acts as its client and a test that acts as its engine.

`ApiServer` makes a run's directory and segments as the supervisor does, starts `engine.process` for api0, answers at the
control socket, keeps the other actors' rows of the counters file alive, and has a `TokenizerPeer` at the rings.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.checkpoint.record import ModelRecord
from engine.keys import key_digest
from engine.messages import Command, Control, Order, Reply
from engine.process.control import ControlServer
from engine.process.events import EventChannel
from engine.process.run_directory import Manifest, Run, lock_run, new_run_id
from engine.process.segments import RunSegments, unlink_segments
from engine.process.topology import MEDIA, SUPERVISOR, ActorLife, actors_of, default_plan
from engine.supervisor.port import reserve_port
from engine.supervisor.unix_socket import unix_socket
from shm.counters import State
from shm.extent_slab import ExtentSlab
from shm.segment import MemoryFile
from tests.api.media_peer import MediaPeer
from tests.api.tokenizer_peer import TokenizerPeer
from tests.configurations import engine_config
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

MODEL = REPOSITORY / "tests" / "golden" / "qwen3"
CHILD = "api0"
ADMIN_KEY = "operator"
OPERATOR = {"authorization": f"Bearer {ADMIN_KEY}"}


class ApiServer:
    def __init__(self, directory: Path, **options: Any) -> None:
        run_id = new_run_id()
        self._open_until_end = contextlib.ExitStack()
        uds = options.get("uds")
        listener = self._open_until_end.enter_context(unix_socket(uds) if uds else reserve_port("127.0.0.1", 0))
        self._listener_fd = listener.fileno() if uds else -1
        self.port = 0 if uds else int(listener.getsockname()[1])
        fields: dict[str, Any] = {
            "model": str(MODEL),
            "served_model_name": ("tiny", "alias"),
            "max_model_len": 256,
            "num_kv_blocks": 16,
            "kv_cache_bytes": 1 << 16,
            "port": self.port,
            "run_id": run_id,
            "run_dir": str(directory),
            "admin_key": key_digest(ADMIN_KEY),
        }
        self.config = engine_config(**(fields | options))
        self.url = self.config.url
        self.run = Run(run_id, directory)
        self._lock = lock_run(self.run)
        plan = default_plan(self.config)
        self.run.write(self.run.model_path, ModelRecord.read(Path(self.config.model)).encode())
        self.run.write_manifest(Manifest(self.config, plan, os.getpid(), time.time()))
        self._segments = RunSegments.of(self.config, [actor.name for actor in plan])
        self.counters = self._segments.counters
        self._others = [name for name in (SUPERVISOR, *(actor.name for actor in plan)) if name != CHILD]
        self.peers = [TokenizerPeer(run_id, f"tokenizer{index}") for index in range(self.config.tokenizer_processes)]
        self.peer = self.peers[0]
        self.media_peers = [
            MediaPeer(run_id, name, ExtentSlab(MemoryFile.from_fd(os.dup(memory.fd), memory.num_bytes)))
            for name in actors_of(MEDIA, self._others)
            for memory in self._segments.media_memory_of(CHILD).values()
        ]
        self.orders: list[Order] = []
        self.events: list[Control] = []
        self.answer: Callable[[Order], Reply] = lambda order: Reply("", 200, "done")
        self._stuck: set[str] = set()  # actors with a stopped heartbeat
        self._hearts = threading.Lock()
        self._is_stopping = False

    # ------------------------------------------------------------------------------------------------------------ life

    def __enter__(self) -> ApiServer:
        for name in self._others:
            self.begin(name, 1)
        for peer in (*self.peers, *self.media_peers):
            peer.start(1)
        self._control = ControlServer(self.run)
        self._events = EventChannel()
        self._supervision = threading.Thread(target=self._supervise, name=SUPERVISOR)
        self._supervision.start()
        self.start_child(1)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end_child()
        finally:
            self._is_stopping = True
            self._supervision.join()
            self._control.close()
            self._events.close()
            for peer in (*self.peers, *self.media_peers):
                peer.stop()
            self._segments.close()
            unlink_segments(self.run.run_id)
            self._open_until_end.close()
            os.close(self._lock)

    def start_child(self, epoch: int) -> None:
        """Start api0 and wait until it serves."""
        self.counters.actor(CHILD).begin_epoch(epoch, time.monotonic_ns())
        media = {name: memory.fd for name, memory in self._segments.media_memory_of(CHILD).items()}
        fds = {"media_fds": media, "events_fd": self._events.sender, "listener_fd": self._listener_fd}
        life = ActorLife(self.config.run_dir, CHILD, epoch, os.getpid(), **fds)
        with self.run.log_path(CHILD).open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "engine.process", msgspec.json.encode(life).decode()],
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
                pass_fds=[fd for fd in (*media.values(), self._events.sender, self._listener_fd) if fd >= 0],
            )
        wait_until(lambda: self.child.poll() is not None or self.is_child_ready(), what="api0 ready")
        assert self.child.poll() is None, self.log

    def end_child(self) -> None:
        """Send SIGTERM; the process must end by itself and without complaints."""
        if self.child.poll() is None:
            self.child.terminate()
        try:
            code = self.child.wait(WATCHDOG_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            raise
        assert code == 0, self.log
        assert not [line for line in self.log.splitlines() if "dropped items from the prompt" not in line], self.log

    def is_child_ready(self) -> bool:
        return self.counters.actor(CHILD).state in (State.READY, State.RUNNING)

    @property
    def log(self) -> str:
        return self.run.log_path(CHILD).read_text()

    def begin(self, name: str, epoch: int) -> None:
        """Begin a life of an actor of the stand-in engine."""
        row = self.counters.actor(name)
        row.begin_epoch(epoch, time.monotonic_ns())
        row.set_state(State.READY)

    def restart_tokenizer(self) -> None:
        """Kill the stand-in tokenizer with everything it held, and start it with the next epoch."""
        self.peer.stop()
        epoch = self.counters.actor(self.peer.name).epoch + 1
        self.peer.start(epoch)
        self.begin(self.peer.name, epoch)

    def restart_media(self) -> None:
        """Restart the media process, like `restart_tokenizer`."""
        (peer,) = self.media_peers
        peer.stop()
        epoch = self.counters.actor(peer.name).epoch + 1
        peer.start(epoch)
        self.begin(peer.name, epoch)

    def _supervise(self) -> None:
        while not self._is_stopping:
            self._control.control.poll(10)
            for command in self._control.commands():
                self._control.reply(self._carry_out(command))
            self.events += self._events.received()
            with self._hearts:
                for name in self._others:
                    if name not in self._stuck:
                        self.counters.actor(name).beat(time.monotonic_ns())

    @contextlib.contextmanager
    def stuck(self, name: str, since_s: float) -> Iterator[None]:
        """Stop the actor's heartbeat within the block, as if it had stopped `since_s` ago."""
        with self._hearts:
            self._stuck.add(name)
            self.counters.actor(name).beat(time.monotonic_ns() - int(since_s * 1e9))
        yield
        self._stuck.remove(name)

    def _carry_out(self, command: Command) -> Reply:
        self.orders.append(command.order)
        reply = self.answer(command.order)
        return Reply(command.command_id, reply.status, reply.message, reply.details)

    # ---------------------------------------------------------------------------------------------------------- clients

    @contextlib.contextmanager
    def connection(self, first: bytes = b"") -> Iterator[socket.socket]:
        """Return a raw connection on which `first` was sent."""
        uds, address = self.config.uds, ("127.0.0.1", self.port)
        with socket.socket(socket.AF_UNIX if uds else socket.AF_INET, socket.SOCK_STREAM) as connection:
            connection.settimeout(WATCHDOG_S)
            connection.connect(uds or address)
            connection.sendall(first)
            yield connection

    def order(self, name: str, body: Any = None) -> httpx.Response:
        return self.post(f"/admin/{name}", body, headers=OPERATOR)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WATCHDOG_S, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = {} if body is None else {"json": body}
        return httpx.post(self.url + path, timeout=WATCHDOG_S, **content, **options)

    def count(self, name: str, **labels: str) -> float:
        return self.counters.counter(name, CHILD, **labels).value

    @contextlib.contextmanager
    def paced(self, credits: int) -> Iterator[None]:
        """Make the peer stop each sequence after `credits` tokens, until the end of the block."""
        self.peer.credits = credits
        try:
            yield
        finally:
            self.peer.credits = None
