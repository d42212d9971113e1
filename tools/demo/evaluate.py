"""Ask a running server the held-out questions and count the right answers.

    python -m tools.demo.evaluate --url http://127.0.0.1:8000/v1 --concurrency 16 --count 100

Run by hand or by the test suite against any OpenAI-compatible server that serves `tools/demo/model`. It asks `--count`
questions of each group of `examination.py`, greedily, prints a line per task and wording and every wrong answer, and
exits with 1 when a group is below its bar, with 2 when the server cannot be asked.
"""

import argparse
import asyncio
import sys

import httpx

from tools.demo.data import Question
from tools.demo.examination import examination, report

MAX_ANSWER_TOKENS = 128


async def ask(client: httpx.AsyncClient, model: str, question: Question) -> str:
    """The server's greedy answer to one question. Raises `httpx.HTTPError` when there is none."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.text}],
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    response = await client.post("chat/completions", json=body)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"] or ""


async def ask_all(url: str, questions: list[Question], concurrency: int, model: str | None, timeout_s: float) -> list[str]:
    """Answers in the order of `questions`, with at most `concurrency` requests open. `model` None asks the server."""
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url.rstrip("/") + "/", timeout=timeout_s, limits=limits) as client:
        if model is None:
            models = await client.get("models")
            models.raise_for_status()
            model = models.json()["data"][0]["id"]
        turns = asyncio.Semaphore(concurrency)

        async def ask_in_turn(question: Question) -> str:
            async with turns:
                return await ask(client, model, question)

        return await asyncio.gather(*map(ask_in_turn, questions))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--concurrency", type=int, default=16, help="requests open at the same time")
    parser.add_argument("--count", type=int, default=100, help="questions in each group")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions")
    parser.add_argument("--model", help="the model's name; by default the first one that the server lists")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for one request")
    options = parser.parse_args()
    is_good = True
    for group, questions in examination(options.count, options.seed):
        try:
            answers = asyncio.run(ask_all(options.url, questions, options.concurrency, options.model, options.timeout_s))
        except httpx.HTTPError as error:
            print(f"cannot ask {options.url}: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        is_good &= report(group, questions, answers)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
