"""Store in which process groups of Paddle find each other, compatible with clients of its TCPStore.

Run by the first rank of a rank group, for its lifetime, on a port that the supervisor reserves (`engine/supervisor/port.py`).
Paddle's own server listens on every address of the machine, this one only on the loopback; and it runs before Paddle is loaded,
so that no client must retry. Numbers have native byte order, as Paddle sends them.

    request    int32 command | uint64 length, key | ADD: int64 | SET: uint64 length, value
    answer     ADD: int64, the sum | GET: uint64 length, value | CHECK, WAIT: int32 | SET: none
"""

from __future__ import annotations

import functools
import socket
import socketserver
import struct
import threading
from enum import IntEnum

LOOPBACK = "127.0.0.1"
_STOP_WAIT, _READY, _NOT_READY = 1, 2, 3
_INT, _LENGTH, _NUMBER = struct.Struct("=i"), struct.Struct("=Q"), struct.Struct("=q")


class _Command(IntEnum):
    ADD, GET, CHECK, SET, WAIT = range(5)


class GroupStore(socketserver.ThreadingTCPServer):
    """Store on `port` of the loopback, running from construction on; a thread per client."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int) -> None:
        super().__init__((LOOPBACK, port), _Client)
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        threading.Thread(target=self._serve, name="group-store", daemon=True).start()

    def _serve(self) -> None:
        while True:  # serve_forever would poll twice a second
            self.handle_request()

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier life
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the supervisor has reserved it
        super().server_bind()


@functools.cache
def open_store(port: int) -> GroupStore:
    """Return this process's store."""
    return GroupStore(port)


class _Client(socketserver.StreamRequestHandler):
    server: GroupStore

    def handle(self) -> None:
        while head := self.rfile.read(_INT.size):
            (command,) = _INT.unpack(head)
            self._carry_out(_Command(command), self._bytes().decode())

    def _carry_out(self, command: _Command, key: str) -> None:
        values, changed = self.server.values, self.server.changed
        with changed:
            match command:
                case _Command.ADD:
                    total = int(values.get(key, b"0")) + self._number(_NUMBER)
                    values[key] = b"%d" % total
                    changed.notify_all()
                    self.wfile.write(_NUMBER.pack(total))
                case _Command.SET:
                    values[key] = self._bytes()
                    changed.notify_all()
                case _Command.GET:
                    self.wfile.write(_LENGTH.pack(len(values[key])) + values[key])
                case _Command.CHECK:
                    self.wfile.write(_INT.pack(_READY if key in values else _NOT_READY))
                case _Command.WAIT:
                    changed.wait_for(lambda: key in values)
                    self.wfile.write(_INT.pack(_STOP_WAIT))

    def _bytes(self) -> bytes:
        return self.rfile.read(self._number(_LENGTH))

    def _number(self, kind: struct.Struct) -> int:
        (number,) = kind.unpack(self.rfile.read(kind.size))
        return int(number)
