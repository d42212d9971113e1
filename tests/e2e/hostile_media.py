"""Thousands of damaged files and of aborted requests: no answer is a 5xx, and no memory stays held.

The suite sends a few of them (`test_pictures.py`); by hand, all:

    python -m tests.e2e.hostile_media [files] [requests] [number of the first file]
"""

from __future__ import annotations

import asyncio
import base64
import random
import sys
from collections import Counter

import httpx

from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.engine.media.test_hostile_files import changed, features
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.pictures import picture

MODEL = "qwen2_5_vl"
PICTURES = {"plain.png": "image/png", "palette_alpha.png": "image/png", "turned6.jpg": "image/jpeg", "cmyk.jpg": "image/jpeg"}
NUM_AT_ONCE = 8


def _data(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _damaged(number: int) -> dict[str, object]:
    """Return the part of a message with a damaged file: each form as often."""
    chance = random.Random(number)
    match number % 5:
        case 0 | 1:
            name = list(PICTURES)[number % 5 * 2 + chance.randrange(2)]
            content = changed((GOLDEN / "vision" / name).read_bytes(), chance)
            return {"type": "image_url", "image_url": {"url": _data(content, PICTURES[name])}}
        case 2:
            content = changed((GOLDEN / "vision" / "clip.mp4").read_bytes(), chance)
            return {"type": "video_url", "video_url": {"url": _data(content, "video/mp4")}}
        case form:
            content = changed(features("npy" if form == 3 else "safetensors"), chance)
            embeds = {"image_embeds": base64.b64encode(content).decode(), "image_grid_thw": [1, 4, 4]}
            return {"type": "image_embeds", "image_embeds": embeds}


def statuses_of_damaged(engine: EngineProcess, numbers: range) -> Counter[int]:
    """Return the statuses of the answers to damaged files."""

    async def run() -> Counter[int]:
        waiting, found = iter(numbers), Counter[int]()
        async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S) as client:

            async def ask() -> None:
                for number in waiting:
                    body = {"messages": [{"role": "user", "content": [_damaged(number)]}], "max_tokens": 1}
                    answer = await client.post("/v1/chat/completions", json=body)
                    found[answer.status_code] += 1
                    assert answer.status_code in (200, 400), f"file {number}: {answer.status_code} {answer.text}"

            await asyncio.gather(*(ask() for _ in range(NUM_AT_ONCE)))
        return found

    return asyncio.run(run())


def abort_a_third(engine: EngineProcess, count: int) -> None:
    """Send requests with pictures, some of them cached; of each three one client leaves, at once or in the answer."""

    async def run() -> None:
        numbers = iter(range(count))
        async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S) as client:

            async def ask() -> None:
                for number in numbers:
                    link = {"url": _data(picture(84, 56, number % 40), "image/png")}
                    content = [{"type": "image_url", "image_url": link}, {"type": "text", "text": f"{number}?"}]
                    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "ignore_eos": True}
                    if number % 6 == 0:
                        await _gone_at_once(client, body)
                        continue
                    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
                        assert stream.status_code == 200, await stream.aread()
                        async for _ in stream.aiter_lines():
                            if number % 6 == 3:
                                break

            await asyncio.gather(*(ask() for _ in range(NUM_AT_ONCE)))

    asyncio.run(run())


async def _gone_at_once(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    """Close the connection right after the request was sent."""
    request = client.build_request("POST", "/v1/chat/completions", json=body)
    assert request.url.port is not None
    _, writer = await asyncio.open_connection(request.url.host, request.url.port)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    writer.write(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    await writer.drain()
    writer.close()


def check_nothing_is_held(engine: EngineProcess) -> None:
    """Check that files, pixels, rows of the arena, blocks and queue places are free."""
    engine.wait_until_idle()

    def is_empty() -> bool:
        return not any(engine.metric(name) for name in ("media_held_bytes", "pixel_slab_used_bytes", "units_waiting"))

    wait_until(is_empty, what="neither files nor pixels are held, and no unit waits")
    answer = httpx.post(f"{engine.url}/admin/reset_encoder_cache", json={}, timeout=WATCHDOG_S, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    wait_until(lambda: engine.metric("num_encoder_cache_units") == 0, what="no unit is kept for a request")
    wait_until(lambda: engine.metric("encoder_cache_usage_perc") == 0, what="no row of the arena is in use")


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    num_files, num_requests, first = given + [10_000, 1_000, 0][len(given) :]
    with EngineProcess(GOLDEN / MODEL, "--dtype", "float32", "--max-model-len", "400", "--restart-limit", "100") as engine:
        print(f"{num_files} damaged files:", dict(statuses_of_damaged(engine, range(first, first + num_files))), flush=True)
        print("restarts:", {name: row["restarts"] for name, row in engine.actors().items() if row["restarts"]}, flush=True)
        check_nothing_is_held(engine)
        abort_a_third(engine, num_requests)
        check_nothing_is_held(engine)
        assert engine.is_healthy()
        print(f"{num_requests} requests, a third of them given up: nothing is held")


if __name__ == "__main__":
    main()
