"""OpenVINO GenAI behind the two routes that a benchmark needs: POST /v1/completions (streamed) and GET /health.

Run with an interpreter that has openvino-genai, starlette and uvicorn, as a peer of `tokamak bench compare` (peers.md):

    python openvino_server.py MODEL_DIRECTORY PORT

One thread drives the continuous batching pipeline; HTTP runs in the asyncio loop of the main thread. Only greedy completions.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openvino_genai
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

CACHE_GB = 3
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 256
NUM_THREADS = 2
CONTEXT_TOKENS = 4  # decoded again with each new token, so that its spaces come out right


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
    handle: Any = None

    @property
    def usage(self) -> dict[str, int]:
        """As OpenAI's API reports it."""
        counts = {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": len(self.token_ids)}
        return counts | {"total_tokens": sum(counts.values())}

    def put(self, delta: tuple[str, int] | None) -> None:
        self.loop.call_soon_threadsafe(self.deltas.put_nowait, delta)


class Engine(threading.Thread):
    """The pipeline and the streams in it."""

    def __init__(self, model: str) -> None:
        super().__init__(daemon=True)
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = CACHE_GB
        settings.max_num_seqs = MAX_NUM_SEQS
        settings.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        settings.dynamic_split_fuse = True
        settings.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": NUM_THREADS}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, settings, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._streams: list[Stream] = []
        self.incoming: queue.SimpleQueue[Stream] = queue.SimpleQueue()

    def run(self) -> None:
        request_ids = itertools.count()
        while True:
            while not self._streams or not self.incoming.empty():
                self._add(self.incoming.get(), next(request_ids))
            self._pipeline.step()
            for stream in list(self._streams):
                self._deliver(stream)

    def _add(self, stream: Stream, request_id: int) -> None:
        token_ids = self._tokenizer.encode(stream.prompt).input_ids
        stream.num_prompt_tokens = token_ids.shape[1]
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = stream.max_tokens
        generation.do_sample = False
        generation.ignore_eos = stream.ignore_eos
        stream.handle = self._pipeline.add_request(request_id, token_ids, generation)
        self._streams.append(stream)

    def _deliver(self, stream: Stream) -> None:
        num_before = len(stream.token_ids)
        while stream.handle.can_read():
            for output in stream.handle.read().values():
                stream.token_ids.extend(output.generated_ids)
        if len(stream.token_ids) > num_before:
            first = max(0, num_before - CONTEXT_TOKENS)
            before = self._tokenizer.decode(stream.token_ids[first:num_before]) if num_before else ""
            text = self._tokenizer.decode(stream.token_ids[first:])[len(before) :]
            stream.put((text, len(stream.token_ids) - num_before))
        if stream.handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
            stream.put(None)
            self._streams.remove(stream)


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


if __name__ == "__main__":
    engine = Engine(sys.argv[1])
    engine.start()
    uvicorn.run(make_app(engine), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
