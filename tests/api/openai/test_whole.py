"""Whole answers with many log-probabilities: the event loop runs between parts of a sequence."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import orjson
import pytest

from api.client.backlog import EncodedRequest
from api.client.generation import Generation, OpenSequence
from api.openai.chat import ChatHead
from api.openai.chat import _answer as chat_answer
from api.openai.completions import ChoiceBuilder, CompletionHead
from api.openai.completions import _answer as completion_answer
from api.openai.logprobs import TOKENS_PER_TURN
from api.schemas.requests import ChatRequest, CompletionRequest
from engine.messages import Delta, Deltas, decode, encode
from tests.api.tokenizer_peer import entry
from tests.requests import parts_of

NUM_SAMPLES = 3
NUM_TOKENS = 4 * TOKENS_PER_TURN + 5  # of the prompt, and of each answer
HEAD = ("an-id", "an object", 0, 'a "choices":[] name')
Answering = Callable[[Generation], Coroutine[Any, Any, Any]]


def generation() -> Generation:
    shared, own = parts_of("r", {})
    made = Generation(
        shared,
        EncodedRequest.of(shared, []),
        sequences_per_prompt=NUM_SAMPLES,
        is_streaming=False,
        abort_connection=print,
        close=print,
    )
    for index in range(NUM_SAMPLES):
        sample = OpenSequence(msgspec.structs.replace(own, request_id=str(index)), "tokenizer0", made)
        entries = [entry(97 + number % 20, -0.5, 5) for number in range(NUM_TOKENS)]
        sample.accept(
            Delta(
                str(index), 0, [97] * NUM_TOKENS, "a", "length", prompt_logprobs=entries[1:], logprobs=entries, weight_version=1
            )
        )
        sample.first_prompt_token = b"a"
        made.sequences.append(sample)
    return made


def complete(made: Generation) -> Coroutine[Any, Any, Any]:
    body = CompletionRequest(prompt="", echo=True, logprobs=5, prompt_logprobs=5, n=NUM_SAMPLES)
    return completion_answer(CompletionHead(*HEAD), made, [ChoiceBuilder(body, "") for _ in made.sequences], NUM_SAMPLES)


def chat(made: Generation) -> Coroutine[Any, Any, Any]:
    body = ChatRequest(logprobs=True, top_logprobs=5, prompt_logprobs=5, n=NUM_SAMPLES)
    return chat_answer(ChatHead(*HEAD), body, made, NUM_SAMPLES)


@pytest.mark.parametrize(("answering", "num_scored"), [(complete, 3 * NUM_SAMPLES), (chat, NUM_SAMPLES + 1)])
def test_the_loop_gets_turns(answering: Answering, num_scored: int) -> None:
    """`num_scored`: how often log-probabilities of a prompt or an answer are written."""
    num_turns = 0
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        nonlocal num_turns
        answer = asyncio.create_task(answering(generation()))
        while not answer.done():
            await asyncio.sleep(0)
            num_turns += 1
        await (await answer)({"type": "http"}, None, send)

    asyncio.run(run())
    assert num_turns >= num_scored * (NUM_TOKENS // TOKENS_PER_TURN)
    bodies = [message["body"] for message in sent[1:]]
    assert len(bodies) == NUM_SAMPLES + 2
    assert dict(sent[0]["headers"])[b"content-length"] == str(sum(map(len, bodies))).encode()
    answer = orjson.loads(b"".join(bodies))
    assert answer["model"] == HEAD[3]
    assert [choice["index"] for choice in answer["choices"]] == [*range(NUM_SAMPLES)]
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        if answering is chat:
            assert len(logprobs["content"]) == NUM_TOKENS
        else:
            assert {len(values) for values in logprobs.values()} == {2 * NUM_TOKENS}
            assert logprobs["text_offset"] == [*range(2 * NUM_TOKENS)]
            assert len(choice["prompt_logprobs"]) == NUM_TOKENS


def test_open_requests_are_not_tracked_by_the_gc() -> None:
    """A collection of millions of tracked lists would stop every stream."""
    deltas = decode(encode(Deltas([Delta("r", 0, [97], "a", prompt_logprobs=[entry(97, -0.5, 5)])])))
    gc.collect()
    assert isinstance(deltas, Deltas)
    (held,) = deltas.deltas[0].prompt_logprobs
    assert not any(map(gc.is_tracked, (held, held.top_token_ids, held.top_logprobs, held.top_tokens)))
