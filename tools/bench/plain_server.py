"""The routes that a benchmark needs, for an engine that is a library: POST /v1/completions (streamed), GET /health.

Used by openvino_server.py and llama_server.py. HTTP runs in the asyncio loop of the main thread, the engine in another thread.
Only greedy completions.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(slots=True)
class Stream:
    """One request. `deltas` receives (text, number of tokens), then None."""

    prompt: str
    max_tokens: int
    ignore_eos: bool
    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[tuple[str, int] | None] = field(default_factory=asyncio.Queue)
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    state: Any = None  # for the engine

    @property
    def usage(self) -> dict[str, int]:
        """Return the usage as OpenAI's API reports it."""
        counts = {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": len(self.token_ids)}
        return counts | {"total_tokens": sum(counts.values())}

    def put(self, delta: tuple[str, int] | None) -> None:
        self.loop.call_soon_threadsafe(self.deltas.put_nowait, delta)


class Engine(threading.Thread):
    """Engine thread; takes streams from `incoming`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.incoming: queue.SimpleQueue[Stream] = queue.SimpleQueue()


def _event(choices: list[dict[str, Any]], **fields: Any) -> bytes:
    return (
        b"data: "
        + orjson.dumps({"id": "c", "object": "text_completion", "model": "model", "choices": choices} | fields)
        + b"\n\n"
    )


async def _events(stream: Stream) -> AsyncIterator[bytes]:
    while (delta := await stream.deltas.get()) is not None:
        yield _event([{"index": 0, "text": delta[0], "finish_reason": None}])
    yield _event([{"index": 0, "text": "", "finish_reason": "length"}])
    yield _event([], usage=stream.usage)
    yield b"data: [DONE]\n\n"


def make_app(engine: Engine) -> Starlette:
    async def completions(request: Request) -> Response:
        body = orjson.loads(await request.body())
        loop = asyncio.get_running_loop()
        stream = Stream(body["prompt"], body.get("max_tokens", 16), body.get("ignore_eos", False), loop)
        engine.incoming.put(stream)
        if body.get("stream"):
            return StreamingResponse(_events(stream), media_type="text/event-stream")
        text = ""
        while (delta := await stream.deltas.get()) is not None:
            text += delta[0]
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        return Response(orjson.dumps({"choices": [choice], "usage": stream.usage}))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


def serve(engine: Engine, port: int) -> None:
    engine.start()
    uvicorn.run(make_app(engine), host="127.0.0.1", port=port, log_level="warning")
