"""Commands to a running engine, over ZeroMQ sockets in the private run directory.

    client (ctl, api)  --DEALER-->  control.ipc, supervisor's ROUTER      Command, answered by Reply

`ControlServer` is the supervisor's side, `control_client.py` the other. Frames are MessagePack (`engine/messages/`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from engine.errors import StartError
from engine.messages import Command, Reply, decode_control, encode
from engine.process.run_directory import Run

MAX_FRAME_BYTES = 1 << 20


class ControlServer:
    """The supervisor's socket. Remembers the client of each command, so that a later answer reaches it."""

    def __init__(self, run: Run) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.control = self._context.socket(zmq.ROUTER)
        self.control.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.control.setsockopt(zmq.LINGER, 1000)
        self._endpoint = run.control_endpoint
        try:
            self.control.bind(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartError(f"cannot make a socket in {run.directory}: {error}; use another --run-dir") from error
        self._clients: dict[str, bytes] = {}

    def commands(self) -> list[Command]:
        """Return the commands received since the last call; each must be answered once with `reply`."""
        commands = []
        while self.control.poll(0):
            client, *frames = self.control.recv_multipart()
            command = _command(frames)
            if command is None:
                self._send(client, Reply("", 400, "not a command"))
            elif command.command_id in self._clients:
                self._send(
                    client, Reply(command.command_id, 409, f"command id {command.command_id} is already in use; choose another")
                )
            else:
                self._clients[command.command_id] = client
                commands.append(command)
        return commands

    def bind_again(self) -> list[Path]:
        """Bind the socket again if its file was removed; return the file if it was."""
        return bind_again(self.control, self._endpoint)

    def reply(self, reply: Reply) -> None:
        """Answer the client of `reply.command_id`, if there is one (still)."""
        client = self._clients.pop(reply.command_id, None)
        if client is not None:
            self._send(client, reply)

    def _send(self, client: bytes, reply: Reply) -> None:
        self.control.send_multipart([client, encode(reply)])

    def close(self) -> None:
        self.control.close()
        self._context.term()


def bind_again(socket: zmq.Socket[bytes], endpoint: str) -> list[Path]:
    """Bind a socket again if the file of its ipc `endpoint` was removed; existing connections continue. Return the path of the
    file if it was removed. Raises OSError if it cannot be bound now."""
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
