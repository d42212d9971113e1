"""Ask a running server the held-out questions and count the right answers.

    python -m tools.demo.evaluate --url http://127.0.0.1:8000/v1 --concurrency 16 --count 100

Run by hand or by the test suite against any OpenAI-compatible server that serves `tools/demo/model`. It asks `--count`
arithmetic questions and as many of the other tasks, greedily, prints a line per task and every wrong answer, and exits
with 1 when a group is below its bar, with 2 when the server cannot be asked.
"""

import argparse
import asyncio
import sys
from collections import Counter

import httpx

from tools.demo.data import ARITHMETIC_TASKS, OTHER_TASKS, Question, held_out_questions, is_correct

GROUPS = {"arithmetic": (ARITHMETIC_TASKS, 0.97), "other tasks": (OTHER_TASKS, 0.95)}
"""Name of a group: its tasks, and the share of right answers that it needs."""

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


def report(questions: list[Question], answers: list[str]) -> bool:
    """Print right answers per task, the wrong ones, and each group's result. True when every group meets its bar."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for question, answer in zip(questions, answers, strict=True):
        asked[question.task] += 1
        if is_correct(question, answer):
            right[question.task] += 1
        else:
            print(f"wrong ({question.task}): {question.text!r} -> {answer!r}, expected {question.answer!r}")
    for task in asked:
        print(f"{task:<12} {right[task]:>4} / {asked[task]}")
    is_good = True
    for name, (tasks, bar) in GROUPS.items():
        num_asked, num_right = sum(asked[task] for task in tasks), sum(right[task] for task in tasks)
        is_group_good = num_right >= bar * num_asked
        is_good &= is_group_good
        verdict = "passed" if is_group_good else "FAILED"
        print(f"{name}: {num_right} of {num_asked} right, {verdict} (the bar is {100 * bar:.0f}%)")
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--concurrency", type=int, default=16, help="requests open at the same time")
    parser.add_argument("--count", type=int, default=100, help="questions in each of the two groups")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions")
    parser.add_argument("--model", help="the model's name; by default the first one that the server lists")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for one request")
    options = parser.parse_args()
    questions = [
        question for tasks, _ in GROUPS.values() for question in held_out_questions(tasks, options.count, options.seed)
    ]
    try:
        answers = asyncio.run(ask_all(options.url, questions, options.concurrency, options.model, options.timeout_s))
    except httpx.HTTPError as error:
        print(f"cannot ask {options.url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0 if report(questions, answers) else 1


if __name__ == "__main__":
    sys.exit(main())
