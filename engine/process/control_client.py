"""Commands to a running engine, over a ZeroMQ socket in its private run directory. Used by ctl and the api."""

from __future__ import annotations

import os
import time

from engine.errors import ControlError, RequestError
from engine.messages import Command, Order, Reply, decode_control, encode
from engine.process.run_directory import Run

DEFAULT_TIMEOUT_S = 600.0
MAX_COMMAND_BYTES = 24 << 10  # the smallest control ring takes this much as one record
_SLICE_S = 0.5  # interval at which a waiting client checks that the engine still runs


class ControlClient:
    """Sends commands to the supervisor of `run`. Each call has its own socket, so calls may overlap."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def ask(self, order: Order, timeout_s: float = DEFAULT_TIMEOUT_S) -> Reply:
        """Send `order` and wait for the reply. Raises ControlError if the engine is not running or does not reply in time,
        RequestError if the command is too long."""
        import zmq  # takes milliseconds, and the api needs it only for an operator's command

        self._require_life()
        frame = _frame(order)
        with zmq.Context(io_threads=1) as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.run.control_endpoint)
            socket.send(frame)
            deadline_s = time.monotonic() + timeout_s
            while not socket.poll(_slice_ms(deadline_s)):
                self._keep_waiting(order, deadline_s, timeout_s)
            return _reply(socket.recv())

    async def ask_async(self, order: Order, timeout_s: float = DEFAULT_TIMEOUT_S) -> Reply:
        """`ask` for an asyncio program."""
        import zmq.asyncio

        self._require_life()
        frame = _frame(order)
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.run.control_endpoint)
            await socket.send(frame)
            deadline_s = time.monotonic() + timeout_s
            while not await socket.poll(_slice_ms(deadline_s)):
                self._keep_waiting(order, deadline_s, timeout_s)
            return _reply(await socket.recv())
        finally:
            socket.close()

    def _require_life(self) -> None:
        if not self.run.is_alive():
            raise ControlError(f"engine {self.run.run_id} is not running ({self.run.lock_path} is not locked)")

    def _keep_waiting(self, order: Order, deadline_s: float, timeout_s: float) -> None:
        self._require_life()
        if time.monotonic() >= deadline_s:
            name = type(order).__name__
            raise ControlError(f"engine {self.run.run_id} did not answer {name} within {timeout_s:g} s; see `tokamak ctl ps`")


def _frame(order: Order) -> bytes:
    command = Command(os.urandom(8).hex(), order)
    frame = encode(command)
    check_length(command, frame)
    return frame


def check_length(command: Command, frame: bytes) -> None:
    """Raise RequestError if the command does not fit a control ring."""
    if len(frame) > MAX_COMMAND_BYTES:
        name = type(command.order).__name__
        raise RequestError(f"{name} has {len(frame)} bytes, the limit is {MAX_COMMAND_BYTES}; shorten its names, path or ranks")


def _reply(frame: bytes) -> Reply:
    reply = decode_control(frame)
    assert isinstance(reply, Reply), reply
    return reply


def _slice_ms(deadline_s: float) -> int:
    return max(1, int(1000 * min(_SLICE_S, deadline_s - time.monotonic())))
