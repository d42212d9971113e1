"""Time to fetch several links of one request, in parallel and one at a time: `python -m tools.bench.links`.

A server on this machine, in its own process, answers each after a delay. They are fetched by the code of the api process
(`api/media/download.py`), both ways in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from contextlib import aclosing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

from api.media.download import Fetcher, download
from engine.errors import RequestError
from engine.options.read import read_options
from engine.options.resolve import resolve
from tools.demo import MODEL

CONTENT = bytes(100_000)


class Handler(BaseHTTPRequestHandler):
    delay_s = 0.0

    def do_GET(self) -> None:
        time.sleep(self.delay_s)
        self.send_response(200)
        self.send_header("content-length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a connection refused for lack of room is retried after a second


def serve(delay_s: float, port: Connection) -> None:
    Handler.delay_s = delay_s
    with Server(("127.0.0.1", 0), Handler) as server:
        port.send(server.server_address[1])
        server.serve_forever()


async def seconds(fetcher: Fetcher, links: list[str], num_at_once: int) -> float:
    begin = time.perf_counter()
    async with aclosing(download(links, partial(fetcher.fetch, max_bytes=1 << 20), num_at_once)) as contents:
        async for content in contents:
            if isinstance(content, RequestError):
                raise content
            assert content == CONTENT
    return time.perf_counter() - begin


async def measure(options: argparse.Namespace, port: int) -> None:
    config = resolve(read_options([str(MODEL), "--allowed-media-networks", "127.0.0.0/8"], {}))[0]
    fetcher = Fetcher(config)
    links = [f"http://127.0.0.1:{port}/{index}" for index in range(options.links)]
    await seconds(fetcher, links, options.parallel)  # warm-up: late imports
    found: dict[int, list[float]] = {1: [], options.parallel: []}
    for _ in range(options.rounds):
        for num_at_once, times in found.items():
            times.append(await seconds(fetcher, links, num_at_once))
    await fetcher.close()
    alone = statistics.median(found[1])
    for num_at_once, times in found.items():
        median = statistics.median(times)
        print(f"| {num_at_once} at a time | {median:.3f} s ({min(times):.3f} to {max(times):.3f}) | {median / alone:.3f} |")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.links", description=__doc__.partition("\n")[0])
    parser.add_argument("--links", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--delay-ms", type=float, default=100, help="default: %(default)s")
    parser.add_argument("--parallel", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args()
    receive, send = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.Process(target=serve, args=(options.delay_ms / 1000, send), daemon=True)
    server.start()
    try:
        asyncio.run(measure(options, receive.recv()))
    finally:
        server.terminate()
        server.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
