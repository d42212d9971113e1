"""A local web server that misbehaves as asked, as the target of links."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.waiting import WATCHDOG_S

CONTENT = bytes(range(256)) * 8
SLOW = CONTENT * 24


class FileServer:
    """`heard`: what was asked for, with its headers. Paths:

    /file/NAME                     CONTENT                       /redirect?to=URL&status=N      elsewhere
    /status/N                      nothing, with a status        /endless                       bytes without a length, for ever
    /flaky/N/NAME                  503 the first N times         /broken                        less than was promised
    /gate/NAME                     CONTENT, once `gate` is set   /gzip                          with a content encoding
    /slow/NAME                     48 KiB, then nothing until `gate` is set
    /new/NAME                      something else each time: `served`, made by `make`
    /held/NAME                     likewise, once `gate` is set
    """

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, str]]] = []
        self.gate = threading.Event()
        self.make: Callable[[int], bytes] = lambda number: CONTENT
        self.served: list[bytes] = []
        self.num_at_once = self.max_at_once = 0
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def running(self, host: str = "127.0.0.1") -> Iterator[FileServer]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with outer.lock:
                    outer.heard.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                    outer.num_at_once += 1
                    outer.max_at_once = max(outer.max_at_once, outer.num_at_once)
                try:
                    with contextlib.suppress(OSError):
                        outer._answer(self)
                finally:
                    with outer.lock:
                        outer.num_at_once -= 1

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer((host, 0), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        self.url = f"http://{host}:{self.port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="files")
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def num_heard(self, beginning: str) -> int:
        return sum(path.startswith(beginning) for path, _ in self.heard)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = parse_qs(parts.query)
        command, _, rest = parts.path.lstrip("/").partition("/")
        status, headers, content = 200, {}, CONTENT
        if command == "redirect":
            status, headers, content = int(query.get("status", ["302"])[0]), {"location": query["to"][0]}, b""
        elif command == "status":
            status, content = int(rest), b""
        elif command == "flaky":
            if self.num_heard(handler.path) <= int(rest.partition("/")[0]):
                status, content = 503, b""
        elif command in ("new", "held"):
            if command == "held":
                self.gate.wait(WATCHDOG_S)
            with self.lock:
                content = self.make(len(self.served))
                self.served.append(content)
        elif command == "gate":
            self.gate.wait(WATCHDOG_S)
        elif command == "gzip":
            headers = {"content-encoding": "gzip"}
        elif command == "endless":
            handler.send_response(200)
            handler.send_header("connection", "close")
            handler.end_headers()
            while not self.gate.is_set():
                handler.wfile.write(CONTENT)
            handler.close_connection = True
            return
        elif command == "slow":
            handler.send_response(200)
            handler.send_header("connection", "close")
            handler.end_headers()
            handler.wfile.write(SLOW)
            self.gate.wait(WATCHDOG_S)
            handler.close_connection = True
            return
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(content) + (1 if command == "broken" else 0)))
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = command == "broken"
