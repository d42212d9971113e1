"""Reuse of known pictures, and delay of text streams by new ones: `python -m tools.bench.seeing`.

    python -m tools.bench.seeing --url http://127.0.0.1:8000 --size 448x448 --stall-size 1024x1024

Seconds until the first token, medians of rounds: for a new picture; for the same at the beginning of the prompt with another
question, which is in the prefix cache; for the same after another text, which is only in the encoder cache. Then the pauses
between two tokens of text streams during a large new picture, compared with those during a long new text.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from typing import Any

import numpy as np
import orjson

from tools.attachments import part
from tools.bench.connection import Client
from tools.bench.pictures import image_size, picture
from tools.bench.prompts import WORDS
from tools.bench.serve import send
from tools.bench.timeline import Timeline
from tools.target import Target

QUESTION_WORDS, PREFACE_WORDS = 24, 64
STREAM_TOKENS = 4096
PATH = "/v1/chat/completions"


class Talk:
    def __init__(self, options: argparse.Namespace) -> None:
        self._client = Client(Target.parse(options.url), 600)
        self._options = options
        self._rng = random.Random(options.seed)
        self._num_pictures = 0
        self._arrivals: list[list[float]] = []  # arrival times of the streams' tokens

    def text(self, num_words: int) -> dict[str, Any]:
        return {"type": "text", "text": " ".join(self._rng.choices(WORDS, k=num_words))}

    def picture(self, size: tuple[int, int]) -> dict[str, Any]:
        """Return a new picture."""
        self._num_pictures += 1
        return part(picture(*size, self._options.seed + self._num_pictures), "image/png")

    async def ask(self, content: list[dict[str, Any]], max_tokens: int = 1) -> Timeline:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"model": self._options.model, "ignore_eos": True, "stream_options": {"include_usage": True}}
        timeline = await send(self._client, PATH, orjson.dumps(body))
        assert not timeline.error, f"{timeline.error}: {timeline.detail}"
        return timeline

    async def seconds(self, content: list[dict[str, Any]]) -> float:
        timeline = await self.ask(content)
        return timeline.deliveries[0] - timeline.sent

    async def pauses(self, contents: list[list[dict[str, Any]]]) -> np.ndarray:
        """Return the pauses between two tokens of text streams while `contents` are answered one after another."""
        streams = [asyncio.create_task(self.stream()) for _ in range(self._options.streams)]
        await asyncio.sleep(1.0)  # until all are decoding
        timelines = [await self.ask(content) for content in contents]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        gaps = [np.diff([each for each in one if each >= timelines[0].sent]) for one in self._arrivals]
        self._arrivals.clear()
        return np.concatenate(gaps)

    async def stream(self) -> None:
        body = {"messages": [{"role": "user", "content": [self.text(QUESTION_WORDS)]}], "max_tokens": STREAM_TOKENS}
        body |= {"model": self._options.model, "ignore_eos": True, "temperature": 0, "stream": True}
        timeline = Timeline()
        self._arrivals.append(timeline.deliveries)
        await self._client.send("POST", PATH, orjson.dumps(body), timeline.feed)

    def close(self) -> None:
        self._client.close()


async def measure(options: argparse.Namespace) -> None:
    talk = Talk(options)
    found: dict[str, list[float]] = {"first": [], "new": [], "known, first in the prompt": [], "known, behind another text": []}
    found["first"].append(await talk.seconds([talk.picture(options.size), talk.text(QUESTION_WORDS)]))
    for _ in range(options.rounds):
        seen = talk.picture(options.size)
        found["new"].append(await talk.seconds([seen, talk.text(QUESTION_WORDS)]))
        found["known, first in the prompt"].append(await talk.seconds([seen, talk.text(QUESTION_WORDS)]))
        behind = [talk.text(PREFACE_WORDS), seen, talk.text(QUESTION_WORDS)]
        found["known, behind another text"].append(await talk.seconds(behind))
    new_s = statistics.median(found["new"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        print(f"| {name} | {median:.3f} s | {median / new_s:.3f} | {min(seconds):.3f} to {max(seconds):.3f} |")
    if options.stall_size:
        p99s = {}
        text = [[talk.text(options.stall_words)] for _ in range(2)]
        for name, contents in (("a text", text), ("a picture", [[talk.picture(options.stall_size), talk.text(2)]])):
            gaps = await talk.pauses(contents)
            p99s[name] = float(np.percentile(gaps, 99))
            print(f"| p99 pause of {options.streams} streams while {name} is new | {p99s[name]:.3f} s | of {len(gaps)} |")
        print(f"| ratio | {p99s['a picture'] / p99s['a text']:.2f} |")
    talk.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.seeing", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="model")
    parser.add_argument("--size", type=image_size, default=(448, 448), metavar="WxH", help="default: 448x448")
    parser.add_argument("--stall-size", type=image_size, metavar="WxH", help="of the large picture; default: that is left out")
    parser.add_argument("--stall-words", type=int, default=2048, help="of the long text; default: %(default)s")
    parser.add_argument("--streams", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
