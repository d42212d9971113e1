"""Ask a running server the held-out questions and count the right answers.

    python -m tools.demo.evaluate --url http://127.0.0.1:8000/v1 --concurrency 16 --count 100

Run by hand or by the test suite against any OpenAI-compatible server that serves `tools/demo/model`. It asks `--count`
questions of each group of `examination.py`, greedily, prints a line per task and wording and every wrong answer, and exits with
1 when a group is below its bar, with 2 when the server cannot be asked. `--thinking` enables reasoning, `--stream` streams the
answers, `--required` forces calls and skips questions without one.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import httpx

from tools.demo.calls import Call
from tools.demo.data import Question
from tools.demo.examination import examination, report

MAX_ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Manner:
    """Options of the requests."""

    thinks: bool = False
    is_streamed: bool = False
    is_call_required: bool = False


def body_of(question: Question, model: str, manner: Manner) -> dict[str, Any]:
    """Return a greedy request for a question."""
    messages = []
    for message in question.messages():
        message = dict(message)
        if "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            texts = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
            message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function} for function in texts]
        elif message["role"] == "tool":
            message["tool_call_id"] = "call_0"
        messages.append(message)
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
    if question.tools:
        body |= {"tools": list(question.definitions()), "tool_choice": "required" if manner.is_call_required else "auto"}
    if manner.thinks:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body | {"stream": manner.is_streamed}


def answer_of(message: dict[str, Any], must_think: bool) -> str:
    """Return content and calls as generated; empty if reasoning was requested but missing."""
    if must_think and not message.get("reasoning_content"):
        return ""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    texts = [Call(function["name"], json.loads(function["arguments"])).text() for function in functions]
    return "\n".join([*filter(None, [message.get("content")]), *texts])


async def ask(client: httpx.AsyncClient, body: dict[str, Any], must_think: bool) -> str:
    """Return the server's answer. Raises `httpx.HTTPError` without one."""
    if not body["stream"]:
        response = await client.post("chat/completions", json=body)
        response.raise_for_status()
        return answer_of(response.json()["choices"][0]["message"], must_think)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    async with client.stream("POST", "chat/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                _add(message, json.loads(line.removeprefix("data: "))["choices"])
    return answer_of(message, must_think)


def _add(message: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    """Add the content of a stream's chunk."""
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            while len(message["tool_calls"]) <= call["index"]:
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            for name, text in call["function"].items():
                message["tool_calls"][call["index"]]["function"][name] += text or ""


async def ask_all(
    url: str, questions: list[Question], concurrency: int, model: str | None, timeout_s: float, manner: Manner
) -> list[str]:
    """Return answers in the order of `questions`, with at most `concurrency` open requests. `model`: None asks the server."""
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url.rstrip("/") + "/", timeout=timeout_s, limits=limits) as client:
        if model is None:
            models = await client.get("models")
            models.raise_for_status()
            model = models.json()["data"][0]["id"]
        turns = asyncio.Semaphore(concurrency)

        async def ask_in_turn(question: Question) -> str:
            async with turns:
                return await ask(client, body_of(question, model or "", manner), manner.thinks)

        return await asyncio.gather(*map(ask_in_turn, questions))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--concurrency", type=int, default=16, help="requests open at the same time")
    parser.add_argument("--count", type=int, default=100, help="questions in each group")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions")
    parser.add_argument("--model", help="the model's name; by default the first one that the server lists")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for one request")
    parser.add_argument("--thinking", action="store_true", help="the model thinks before it answers")
    parser.add_argument("--stream", action="store_true", help="take the answers as streams")
    parser.add_argument("--required", action="store_true", help="demand the calls; nothing else is asked")
    options = parser.parse_args()
    manner = Manner(options.thinking, options.stream, options.required)
    is_good = True
    for group, questions in examination(options.count, options.seed):
        if options.required:
            questions = [question for question in questions if question.call]
            if not questions:
                continue
        try:
            asking = ask_all(options.url, questions, options.concurrency, options.model, options.timeout_s, manner)
            answers = asyncio.run(asking)
        except httpx.HTTPError as error:
            print(f"cannot ask {options.url}: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        is_good &= report(group, questions, answers)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
