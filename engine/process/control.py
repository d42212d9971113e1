"""Orders to a running engine and events of its actors, over ZeroMQ sockets in the private run directory.

    client (ctl, api)  --DEALER-->  control.ipc, supervisor's ROUTER      Command, answered by Reply
    actor              --PUSH---->  events.ipc, supervisor's PULL         ActorState, Membership, Reply

`ControlClient` is what ctl and the api use; `ControlServer` is the supervisor's side. Frames are MessagePack
(`engine/messages/`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import zmq

from engine.errors import ControlError, StartError
from engine.messages import Command, Control, Order, Reply, decode_control, encode
from engine.process.run_directory import Run

DEFAULT_TIMEOUT_S = 600.0
MAX_FRAME_BYTES = 1 << 20
_SLICE_S = 0.5  # a waiting client looks this often whether the engine still lives


class ControlClient:
    """Gives orders to the supervisor of `run`. Each call has a socket of its own, so calls may overlap."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def ask(self, order: Order, timeout_s: float = DEFAULT_TIMEOUT_S) -> Reply:
        """Give `order` and wait for the answer. ControlError where the engine does not live or does not answer in time."""
        self._require_life()
        command = Command(os.urandom(8).hex(), order)
        with zmq.Context(io_threads=1) as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.run.control_endpoint)
            socket.send(encode(command))
            deadline_s = time.monotonic() + timeout_s
            while not socket.poll(_slice_ms(deadline_s)):
                self._keep_waiting(order, deadline_s, timeout_s)
            return _reply(socket.recv())

    async def ask_async(self, order: Order, timeout_s: float = DEFAULT_TIMEOUT_S) -> Reply:
        """`ask` for an asyncio program."""
        import zmq.asyncio  # asyncio is much to load for the supervisor, which imports this module too

        self._require_life()
        command = Command(os.urandom(8).hex(), order)
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.run.control_endpoint)
            await socket.send(encode(command))
            deadline_s = time.monotonic() + timeout_s
            while not await socket.poll(_slice_ms(deadline_s)):
                self._keep_waiting(order, deadline_s, timeout_s)
            return _reply(await socket.recv())
        finally:
            socket.close()

    def _require_life(self) -> None:
        if not self.run.is_alive():
            raise ControlError(f"engine {self.run.run_id} does not run (nobody holds {self.run.lock_path})")

    def _keep_waiting(self, order: Order, deadline_s: float, timeout_s: float) -> None:
        self._require_life()
        if time.monotonic() >= deadline_s:
            name = type(order).__name__
            raise ControlError(f"engine {self.run.run_id} did not answer {name} within {timeout_s:g} s; see `tokamak ctl ps`")


class ControlServer:
    """The supervisor's sockets. Remembers who asked what, so that an answer that comes later finds its way."""

    def __init__(self, run: Run) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.control = self._context.socket(zmq.ROUTER)
        self.control.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.control.setsockopt(zmq.LINGER, 1000)
        self.events = self._context.socket(zmq.PULL)
        try:
            self._endpoints = {self.control: run.control_endpoint, self.events: run.events_endpoint}
            for socket, endpoint in self._endpoints.items():
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartError(
                f"cannot make sockets in {run.directory}: {error}; give another directory with --run-dir"
            ) from error
        self._clients: dict[str, bytes] = {}

    def commands(self) -> list[Command]:
        """The orders that came since; each is to be answered once with `reply`."""
        commands = []
        while self.control.poll(0):
            client, *frames = self.control.recv_multipart()
            command = _command(frames)
            if command is None:
                self._send(client, Reply("", 400, "not a command"))
            elif command.command_id in self._clients:
                self._send(client, Reply(command.command_id, 409, f"command id {command.command_id} is taken; choose another"))
            else:
                self._clients[command.command_id] = client
                commands.append(command)
        return commands

    def received_events(self) -> list[Control]:
        """What the actors sent since."""
        events = []
        while self.events.poll(0):
            events.append(decode_control(self.events.recv()))
        return events

    def bind_again(self) -> list[Path]:
        """The socket files that were removed and are there again."""
        return [path for socket, endpoint in self._endpoints.items() for path in bind_again(socket, endpoint)]

    def reply(self, reply: Reply) -> None:
        """Answer the client of `reply.command_id`; nothing happens where there is none (any more)."""
        client = self._clients.pop(reply.command_id, None)
        if client is not None:
            self._send(client, reply)

    def _send(self, client: bytes, reply: Reply) -> None:
        self.control.send_multipart([client, encode(reply)])

    def close(self) -> None:
        self.control.close()
        self.events.close(linger=0)
        self._context.term()


def bind_again(socket: zmq.Socket[bytes], endpoint: str) -> list[Path]:
    """Bind a socket once more where the file of its ipc `endpoint` was removed; its connections stand. The path of the file,
    if it was. OSError: it cannot be bound now."""
    path = Path(endpoint.removeprefix("ipc://"))
    if not endpoint.startswith("ipc:///") or path.exists():
        return []
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error), str(path)) from error
    return [path]


def _command(frames: list[bytes]) -> Command | None:
    try:
        command = decode_control(b"".join(frames))
    except msgspec.DecodeError:
        return None
    return command if isinstance(command, Command) else None


def _reply(frame: bytes) -> Reply:
    reply = decode_control(frame)
    assert isinstance(reply, Reply), reply
    return reply


def _slice_ms(deadline_s: float) -> int:
    return max(1, int(1000 * min(_SLICE_S, deadline_s - time.monotonic())))
