"""Accepts connections to an api process that has a certificate.

A connection counts towards the limits of `admission.py` from its beginning, and a silent one is closed in time. uvicorn itself
would only know a connection after its TLS handshake, however many are waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from uvicorn.server import ServerState

from api.connection import Connection

MAX_AT_ONCE = 64  # accepted in one turn of the loop
PAUSE_S = 0.5  # when the process cannot open more files


class Handshake:
    """A connection until its handshake is complete."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client

    def cut(self) -> None:
        Connection.admission.leave(self)
        with contextlib.suppress(OSError):  # it is gone
            self._client.shutdown(socket.SHUT_RDWR)


class SecureConnection(Connection):
    handshake: Handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.admission.leave(self.handshake)
        super().connection_made(transport)


class TlsListener:
    def __init__(
        self,
        listener: socket.socket,
        backlog: int,
        context: ssl.SSLContext,
        make: Callable[[], SecureConnection],
        state: ServerState,
    ) -> None:
        """Begin to accept. `make` creates a connection when its handshake is complete."""
        self._listener = listener
        self._context = context
        self._make = make
        self._state = state
        self._handshakes: set[Handshake] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Accept no more; handshakes in progress end."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        for handshake in list(self._handshakes):
            handshake.cut()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(PAUSE_S, self._resume)
                return
            client.setblocking(False)
            task = self._loop.create_task(self._open(client, address[0] if isinstance(address, tuple) else ""))
            self._state.tasks.add(task)
            task.add_done_callback(self._state.tasks.discard)

    async def _open(self, client: socket.socket, host: str) -> None:
        handshake = Handshake(client)
        is_admitted = Connection.admission.enter(handshake, host)
        timeout_s = Connection.head_timeout_s if is_admitted else Connection.surplus_head_timeout_s
        connection = self._make()
        connection.handshake = handshake
        self._handshakes.add(handshake)
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._context, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # not TLS, too slow, closed, or the client disconnected
            client.close()
        finally:
            self._handshakes.discard(handshake)
            Connection.admission.leave(handshake)
