"""`tokamak bench serve`: load test of any server with OpenAI's API.

Runs in its own process, as a client; `main` is called by tools/cli.py. Reading order: timeline.py (what is measured),
prompts.py (what is sent), connection.py (how), report.py (results).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.errors import EXIT_FAILED, OptionError, TokamakError, exit_code_of
from engine.options.argument_parser import ArgumentParser
from tools.bench.connection import Client
from tools.bench.pictures import Pictures, image_size
from tools.bench.prompts import PromptMaker, prepare
from tools.bench.report import render, summarize
from tools.bench.timeline import Timeline
from tools.exits import INTERRUPTED
from tools.target import add_target_arguments, error_text, find_target

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WARMUP_TOKENS = 4


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class Load:
    """One run of load: `requests` are sent by `in_waves` or `at_rate`; `timelines` grows as they end, so that an interrupted
    run still has a result."""

    def __init__(self, client: Client, path: str, requests: Sequence[bytes], on_end: Callable[[], None]) -> None:
        self.timelines: list[Timeline] = []
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._client = client
        self._path = path
        self._requests = requests
        self._on_end = on_end

    async def in_waves(self, concurrency: int) -> None:
        """Send a new request as soon as one of `concurrency` ends."""
        remaining = iter(self._requests)

        async def stream() -> None:
            for request in remaining:
                await self._send(request)

        await self._timed(asyncio.gather(*(stream() for _ in range(min(concurrency, len(self._requests))))))

    async def at_rate(self, rate: float, rng: random.Random) -> None:
        """Send requests with Poisson arrivals, `rate` per second, regardless of the answers."""

        async def arrivals() -> None:
            tasks = []
            due = time.monotonic()
            for request in self._requests:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(asyncio.create_task(self._send(request)))
                due += rng.expovariate(rate)
            await asyncio.gather(*tasks)

        await self._timed(arrivals())

    async def _timed(self, work: Awaitable[Any]) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        try:
            await work
        finally:
            self.wall_s = time.perf_counter() - begin_s
            self.cpu_s = time.process_time() - begin_cpu_s

    async def _send(self, request: bytes) -> None:
        self.timelines.append(await send(self._client, self._path, request))
        self._on_end()


async def send(client: Client, path: str, request: bytes) -> Timeline:
    """Send one streamed request and follow it to its end or error."""
    timeline = Timeline(sent=time.perf_counter())
    try:
        status = await client.send("POST", path, request, timeline.feed)
    except TimeoutError as error:
        timeline.fail("timeout", str(error), time.perf_counter())
    except OSError as error:
        timeline.fail("connection", str(error), time.perf_counter())
    else:
        now = time.perf_counter()
        if status != 200:
            timeline.fail(f"http {status}", error_text(timeline.head), now)
        elif not timeline.is_complete:
            timeline.fail("cut short", "the stream ended without [DONE]", now)
        elif not timeline.deliveries:
            timeline.fail("no tokens", "the stream had no tokens", now)
    return timeline


def _request(
    options: argparse.Namespace,
    maker: PromptMaker,
    prompt: str | list[int],
    output_len: int,
    pictures: list[dict[str, Any]],
) -> bytes:
    body: dict[str, Any] = {
        "model": options.model,
        **maker.body(prompt, pictures),
        "max_tokens": output_len,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    return orjson.dumps(body | options.extra)


async def first_model(client: Client) -> str:
    status, body = await client.get("/v1/models")
    try:
        return msgspec.json.decode(body, type=ModelList).data[0].id
    except (msgspec.DecodeError, IndexError):
        answer = f"{status} from /v1/models, which lists no model ({error_text(body)})"
        raise TokamakError(f"{answer}; use --model or --api-key") from None


async def _run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    client = Client(options.target, options.timeout)
    path = PATHS[options.endpoint]
    try:
        options.model = options.model or await first_model(client)
        maker = await prepare(client, options.model, options.endpoint, options.prompts, options.input_len)
        count = options.num_prompts + options.warmup
        prompts = maker.prompts(count, options.input_len, options.shared_prefix_len, options.seed)
        pictures = Pictures(options)
        for index in range(options.num_prompts, count):
            output_len = min(WARMUP_TOKENS, options.output_len)
            warm = await send(client, path, _request(options, maker, prompts[index], output_len, pictures.of(index)))
            if warm.error:
                raise TokamakError(f"the warm-up request failed: {warm.error}: {warm.detail}")
        requests = [
            _request(options, maker, prompts[index], options.output_len, pictures.of(index))
            for index in range(options.num_prompts)
        ]
        load = await _run_load(options, client, path, requests, console)
    finally:
        client.close()
    return summarize(load.timelines, load.wall_s, load.cpu_s)


async def _run_load(options: argparse.Namespace, client: Client, path: str, requests: list[bytes], console: Console) -> Load:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{options.model}", total=len(requests))
        load = Load(client, path, requests, lambda: progress.advance(task))
        try:
            if options.request_rate:
                await load.at_rate(options.request_rate, random.Random(options.seed))
            else:
                await load.in_waves(options.concurrency)
        except asyncio.CancelledError:
            if not load.timelines:
                raise
            console.print("interrupted; results so far:", style="yellow")
    return load


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {value}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="tokamak bench serve", description="Load test of any server that has the OpenAI API.")
    server = parser.add_argument_group("server")
    add_target_arguments(server)
    server.add_argument("--model", default="", help="default: the first model in /v1/models")
    server.add_argument("--endpoint", choices=sorted(PATHS), default="completions", help="default: %(default)s")
    server.add_argument("--timeout", type=_rate, default=600.0, metavar="S", help="timeout per request; default: %(default)g")
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=_positive, default=64, metavar="N", help="number of requests; default: %(default)s")
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--concurrency", type=_positive, default=8, metavar="N", help="number of concurrent requests; default: %(default)s"
    )
    arrivals.add_argument(
        "--request-rate", type=_rate, metavar="R", help="send R requests per second with Poisson arrivals instead"
    )
    load.add_argument(
        "--input-len", type=_positive, default=256, metavar="N", help="prompt tokens per request; default: %(default)s"
    )
    load.add_argument("--output-len", type=_positive, default=64, metavar="N", help="max_tokens; default: %(default)s")
    load.add_argument(
        "--images-per-request", type=_count, default=0, metavar="N", help="images per request; needs --endpoint chat"
    )
    load.add_argument(
        "--image-size",
        type=image_size,
        default=(448, 448),
        metavar="WxH",
        help="size of the images in pixels; default: 448x448",
    )
    load.add_argument(
        "--distinct-images", type=_positive, metavar="N", help="number of different images; default: every image is different"
    )
    load.add_argument(
        "--shared-prefix-len", type=_count, default=0, metavar="N", help="prompt tokens that all requests have in common"
    )
    load.add_argument(
        "--prompts",
        choices=("auto", "ids", "text"),
        default="auto",
        help="send prompts as token ids or text; default: ids if the server accepts them",
    )
    load.add_argument("--ignore-eos", action="store_true", help="always generate --output-len tokens, even after an end token")
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)g")
    load.add_argument("--extra", type=_object, default={}, metavar="JSON", help="additional fields for each request")
    load.add_argument(
        "--warmup", type=_count, default=1, metavar="N", help="requests before the measurement; default: %(default)s"
    )
    load.add_argument("--seed", type=int, help="seed of prompts and arrivals; default: random, so that no prompt is cached")
    parser.add_argument("--output", metavar="FILE", help="write the result as JSON to this file, - for stdout")
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = _parser().parse_args(argv)
    if options.shared_prefix_len > options.input_len:
        raise OptionError(f"--shared-prefix-len {options.shared_prefix_len} exceeds --input-len {options.input_len}; lower it")
    if options.images_per_request and options.endpoint != "chat":
        raise OptionError("--images-per-request needs --endpoint chat")
    if options.endpoint == "chat" and options.prompts == "ids":
        raise OptionError("--prompts ids needs --endpoint completions; chats take only text")
    if options.seed is None:
        options.seed = time.time_ns() % 2**32
    options.target = find_target(options)
    options.url = options.target.url
    return options


def _write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    settings = {
        name: value for name, value in vars(options).items() if name not in ("target", "api_key", "output", "run", "run_dir")
    }
    if options.request_rate:
        settings["concurrency"] = None
    document = orjson.dumps({"settings": settings, "result": result}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if options.output == "-":
        sys.stdout.write(document.decode())
    else:
        Path(options.output).write_bytes(document)


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0: every request succeeded; 1: some failed, or nothing was measured; 2: bad options; 130:
    interrupted."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        options = _parse(argv)
    except TokamakError as error:
        console.print(f"tokamak bench serve: {error}", style="red", markup=False)
        return exit_code_of(error)
    try:
        result = uvloop.run(_run(options, console))
        if options.output:
            _write(options, result)
    except (TokamakError, OSError) as error:
        console.print(f"tokamak bench serve: {options.url}: {error}", style="red", markup=False)
        return EXIT_FAILED
    except asyncio.CancelledError:
        return INTERRUPTED
    if options.output != "-":
        Console(highlight=False).print(render(result))
    return 0 if not result["errors"] else 1
