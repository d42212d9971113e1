"""HTTP client of one server: keep-alive connections over TCP, TLS or a UNIX socket, for any number of threads.

Used by `asking.py`. Returns replies of any status.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit


class Reply(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float | None = None
    request_id: str = ""


class Server:
    """`url`: `http://HOST:PORT/PREFIX`, `https://...`, or `unix:PATH`. `close` ends requests in flight of all threads; later
    requests open new connections. A fork of the process opens its own connections, because two processes on one connection
    would get each other's answers."""

    def __init__(self, url: str, key: str = "", timeout_s: float | None = None) -> None:
        """`timeout_s`: the longest silence of the server; None: no limit."""
        self.url = url
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = timeout_s
        self._uds = url.removeprefix("unix:") if url.startswith("unix:") else ""
        parts = urlsplit("http://localhost" if self._uds else url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; expected http://HOST:PORT or unix:PATH")
        self._host, self._port = parts.hostname, parts.port
        self._is_tls = parts.scheme == "https"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._num_closed = 0
        self._begin()

    def send(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """Return the whole reply. OSError (ConnectionError, TimeoutError) if there is none."""
        self._leave_inherited()
        with self._lock:
            connection = self._idle.pop() if self._idle else None
            num_closed = self._num_closed
        request = (method, self._prefix + path, body, self._headers)
        if connection is not None:
            with contextlib.suppress(ConnectionError):  # the server closed the idle connection
                return self._exchange(connection, request, num_closed)
        return self._exchange(self._connection(), request, num_closed)

    @contextlib.contextmanager
    def stream(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """Provide a streamed reply on its own connection, which ends with the block. OSError if there is none, or it breaks
        off."""
        connection = self._connection()
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            yield connection.getresponse()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def close(self) -> None:
        self._leave_inherited()
        with self._lock:
            self._num_closed += 1
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with contextlib.suppress(OSError, AttributeError):  # not connected yet, or no longer
                    connection.sock.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    def _begin(self) -> None:
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def _leave_inherited(self) -> None:
        """Drop the parent's connections after a fork. A thread of the parent may even hold the lock."""
        if self._owner != os.getpid():
            self._begin()

    def _exchange(
        self, connection: http.client.HTTPConnection, request: tuple[str, str, bytes | None, dict[str, str]], num_closed: int
    ) -> Reply:
        is_reusable = False
        try:
            if connection.sock is None:
                connection.connect()
            with self._lock:
                if self._num_closed != num_closed:
                    raise ConnectionAbortedError("closed")
                self._busy.add(connection)
            connection.request(*request)
            reply = connection.getresponse()
            content = reply.read()
            is_reusable = not reply.will_close
        except http.client.HTTPException as error:  # such as a connection that ended during the reply
            raise ConnectionError(f"{self.url} did not answer in HTTP: {error!r}") from error
        finally:
            with self._lock:
                self._busy.discard(connection)
                is_reusable &= self._num_closed == num_closed
                if is_reusable:
                    self._idle.append(connection)
            if not is_reusable:
                connection.close()
        retry_after = reply.getheader("retry-after", "")
        wait_s = float(retry_after) if retry_after.isdecimal() else None
        return Reply(reply.status, content, wait_s, reply.getheader("x-request-id", ""))

    def _connection(self) -> http.client.HTTPConnection:
        if self._uds:
            return _UnixConnection(self._uds, self._timeout_s)
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
