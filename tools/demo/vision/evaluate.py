"""Show a running server held-out pictures and clips, ask about them, and count the right answers.

    tools/serve --demo vision
    python -m tools.demo.vision.evaluate --url http://127.0.0.1:8000/v1 --concurrency 8 --count 100

Run by hand or by the test suite against any OpenAI-compatible server that serves `tools/demo/vision/model`. It asks `--count`
questions of each group of `examination.py`, greedily, once with their pictures and once with those of other questions, and
exits with 1 when a group misses its bars, with 2 when the server cannot be asked.
"""

import argparse
import asyncio
import base64
import sys
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import httpx
from PIL import Image

from tools.demo.vision.examination import GROUPS, Question, exchanged, report

MAX_ANSWER_TOKENS = 80


def files(question: Question) -> list[bytes]:
    """Return its pictures as PNG, or the frames of a clip as JPEG."""
    form, options = ("JPEG", {"quality": 90}) if question.kind == "clip" else ("PNG", {})
    found = []
    for picture in question.pictures:
        file = BytesIO()
        Image.fromarray(picture.pixels).save(file, form, **options)
        found.append(file.getvalue())
    return found


def parts(question: Question) -> list[dict[str, Any]]:
    """Return the content of its message: pictures or clip, and the text."""
    text = {"type": "text", "text": question.turn.text}
    encoded = [base64.b64encode(file).decode() for file in files(question)]
    if question.kind == "clip":
        return [{"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(encoded)}"}}, text]
    return [*({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in encoded), text]


async def ask_all(url: str, questions: Sequence[Question], concurrency: int, timeout_s: float = 120) -> list[str]:
    """Return the server's greedy answers in the order of `questions`, with at most `concurrency` open requests. Raises
    `httpx.HTTPError` without one."""
    async with httpx.AsyncClient(base_url=url.rstrip("/") + "/", timeout=timeout_s) as client:
        turns = asyncio.Semaphore(concurrency)

        async def ask(question: Question) -> str:
            messages = [{"role": "user", "content": parts(question)}]
            async with turns:
                body = {"messages": messages, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
                response = await client.post("chat/completions", json=body)
            response.raise_for_status()
            return response.json()["choices"][0]["message"]["content"] or ""

        return await asyncio.gather(*map(ask, questions))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--concurrency", type=int, default=8, help="requests open at the same time")
    parser.add_argument("--count", type=int, default=100, help="questions in each group")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions")
    options = parser.parse_args()
    is_good = True
    for group in GROUPS:
        questions = group.questions(options.count, options.seed)
        try:
            asked = asyncio.run(ask_all(options.url, [*questions, *exchanged(questions)], options.concurrency))
        except httpx.HTTPError as error:
            print(f"cannot ask {options.url}: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        is_good &= report(group, questions, asked[: options.count], asked[options.count :])
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
