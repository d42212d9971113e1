"""`POST /v1/completions`: prompts as text or token ids, one or many, with echo, log-probabilities and best-of.

Runs in the api process. Choice p * n + i is sequence i of prompt p.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import cast

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from api.client.generation import Generation, OpenSequence
from api.fingerprint import Fingerprints
from api.media.parts import bounds_of, completion_parts
from api.model import ServedModel
from api.openai.logprobs import CompletionLogprobsBuilder, LogprobsShown, logprobs_by_id, prompt_logprobs
from api.openai.sse import ChunkWriter
from api.openai.usage import timings_of, usage_of
from api.openai.whole import WholeAnswer
from api.request_context import RequestContext, until_finished
from api.schemas import requests
from api.schemas.requests import CompletionMedia, CompletionRequest, invalid
from api.schemas.responses import Completion, CompletionChoice, CompletionLogprobs, FinishReason, encoder
from api.schemas.unsupported import check_supported
from api.sse import EventStream
from api.submission import (
    check_max_tokens,
    check_sequences,
    check_stream,
    check_vocabulary,
    deadline_of,
    int32,
    open_generation,
    sampling_params,
)
from engine.messages import Delta, Prompt, SamplingParams, TextPrompt, TokensPrompt

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


class CompletionHead(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str


async def create_completion(request: Request) -> Response:
    """Handle `POST /v1/completions`."""
    context = RequestContext.of(request)
    model = context.services.model
    fields = await context.fields(request)
    body, behind = requests.convert(fields, CompletionRequest), requests.convert(fields, CompletionMedia)
    check_supported(fields, is_chat=False)
    del fields  # the prompts are in `body`
    await asyncio.sleep(0)  # the next steps may take as long
    head = CompletionHead(f"cmpl-{context.request_id}", "text_completion", int(time.time()), model.resolve(body.model))
    prompts = prompts_of(body.prompt, model, body.add_special_tokens is not False, suffix=body.suffix)
    _check_echo(body)
    echoes = [await _text_of(prompt, request) if body.echo else "" for prompt in prompts]
    generation, n = await open_completion(request, body, behind, prompts, DEFAULT_MAX_TOKENS)
    builders = [ChoiceBuilder(body, echo) for echo in echoes for _ in range(generation.sequences_per_prompt)]
    if body.stream:
        return EventStream(generation, CompletionWriter(head, body, context.services.fingerprints, builders))
    await until_finished(generation, request.receive)
    fingerprint = context.services.fingerprints.of(generation.weight_version, generation.adapter)
    return await _answer(head, generation, builders, n, bool(body.timings), fingerprint)


async def open_completion(
    request: Request, body: CompletionRequest, behind: CompletionMedia, prompts: list[Prompt], default_max_tokens: int | None
) -> tuple[Generation, int]:
    """Submit the prompts. Also return how many sequences of each are wanted. `default_max_tokens`: None: up to the model's
    limit."""
    context = RequestContext.of(request)
    model = context.services.model
    check_stream(body)
    n, best_of = check_sequences(body, len(prompts), model)
    max_tokens = default_max_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens is not None:
        check_max_tokens("max_tokens", max_tokens, body, model)
    parts = completion_parts(behind)
    mask_bounds = array("i", bounds_of(behind.attention_mask_offset or [])).tobytes()
    if len(prompts) > 1 and (parts or mask_bounds):
        raise invalid("prompt", f"{len(prompts)} prompts with media or attention_mask_offset, which need 1; send one")
    sampling = _sampling(body, model, max_tokens, has_rivals=best_of > n)
    deadline_ns = deadline_of(context, body)
    media = await context.services.media.gather(parts, request, behind, context.key, deadline_ns)
    return open_generation(request, body, prompts, sampling, best_of=best_of, media=media, mask_bounds=mask_bounds), n


def _check_echo(body: CompletionRequest) -> None:
    """Check that the prompt can be echoed as it was sent."""
    for param in ("suffix", "truncate_prompt_tokens", "logprob_token_ids", "logprobs_by_id"):
        if body.echo and getattr(body, param) not in (None, False):
            raise invalid("echo", f"cannot be combined with {param}; remove one of them")
    for param in ("logprob_token_ids", "logprobs_by_id"):
        if getattr(body, param) and body.logprobs is None:
            raise invalid(param, "only allowed if logprobs is set")


def _sampling(body: CompletionRequest, model: ServedModel, max_tokens: int | None, has_rivals: bool) -> SamplingParams:
    """Return the sampling parameters. An echo needs log-probabilities of the prompt, competing sequences need their own."""
    num_logprobs = -1 if body.logprobs is None else body.logprobs
    num_prompt_logprobs = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    return sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        num_logprobs=max(num_logprobs, 0) if has_rivals else num_logprobs,
        num_prompt_logprobs=max(num_prompt_logprobs, num_logprobs) if body.echo else num_prompt_logprobs,
    )


def prompts_of(
    prompt: str | list[int | str | list[int]],
    model: ServedModel,
    add_special_tokens: bool = True,
    param: str = "prompt",
    suffix: str | None = None,
) -> list[Prompt]:
    """Return the prompts of a body's field `param`, each as sent to a tokenizer; `suffix` is the text after the gap."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt[0], int) and len(prompt) > model.max_sequences:
        raise invalid(param, f"{len(prompt)} prompts, but the limit per request is {model.max_sequences}; send fewer")
    kinds = {type(item) for item in prompt}
    if suffix is not None and kinds != {str}:
        raise invalid("suffix", "only allowed with text prompts, not token ids")
    if len(kinds) != 1:
        raise invalid(param, "a list must contain only texts, only token ids, or only lists of token ids")
    if kinds == {str}:
        return [TextPrompt(text, add_special_tokens, suffix) for text in cast(list[str], prompt)]
    lists = [cast(list[int], prompt)] if kinds == {int} else cast(list[list[int]], prompt)
    for token_ids in lists:
        check_vocabulary(param, token_ids, model)
    return [TokensPrompt(int32(token_ids)) for token_ids in lists]


class ChoiceBuilder:
    """Builds one choice, whole or piece by piece; an echo is in the first piece."""

    def __init__(self, body: CompletionRequest, echoed: str) -> None:
        self._body = body
        self._shown = LogprobsShown.of(body, body.logprobs or 0)
        self._logprobs = CompletionLogprobsBuilder(self._shown)
        self._echoed = echoed
        self._is_first = True

    def piece(self, index: int, sequence: OpenSequence, delta: Delta) -> CompletionChoice:
        return self._choice(index, sequence, delta, self._piece_logprobs(sequence, delta))

    async def whole(self, index: int, sequence: OpenSequence) -> bytes:
        """Return the whole choice, encoded."""
        delta = sequence.take()
        logprobs = None
        if self._body.logprobs is not None and not self._body.logprobs_by_id:
            first_token = self._first_token(sequence) if self._body.echo else None
            logprobs = await self._logprobs.whole(first_token, sequence.prompt_logprobs, delta.logprobs)
        choice = self._choice(index, sequence, delta, logprobs)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = await prompt_logprobs(sequence.prompt_logprobs, self._body.prompt_logprobs)
        if self._body.logprobs_by_id:
            choice.logprobs_by_id = await logprobs_by_id(delta.logprobs, self._shown.num_top)
        sequence.prompt_logprobs.clear()  # freeing those of all sequences at once would block the loop too
        return encoder.encode(choice)

    def _choice(
        self, index: int, sequence: OpenSequence, delta: Delta, logprobs: CompletionLogprobs | None
    ) -> CompletionChoice:
        choice = CompletionChoice(
            index=index,
            text=self._echoed + delta.text if self._is_first else delta.text,
            logprobs=logprobs,
            finish_reason=cast(FinishReason, delta.finish_reason) if delta.finish_reason else None,
            stop_reason=delta.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if self._is_first:
                choice.prompt_token_ids = sequence.prompt_token_ids
        self._is_first = False
        return choice

    def _first_token(self, sequence: OpenSequence) -> tuple[int, bytes]:
        """Return the first token of the prompt; its id is known if tokens are named by id."""
        return (sequence.prompt_token_ids or [-1])[0], sequence.first_prompt_token

    def _piece_logprobs(self, sequence: OpenSequence, delta: Delta) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        if self._is_first and self._body.echo:
            return self._logprobs.with_prompt(self._first_token(sequence), sequence.prompt_logprobs, delta.logprobs)
        return self._logprobs.piece(delta.logprobs)


class CompletionWriter(ChunkWriter):
    def __init__(
        self, head: CompletionHead, body: CompletionRequest, fingerprints: Fingerprints, builders: Sequence[ChoiceBuilder]
    ) -> None:
        super().__init__(head, body, fingerprints)
        self._builders = builders

    def choices(self, index: int, sequence: OpenSequence, delta: Delta) -> list[CompletionChoice]:
        return [self._builders[index].piece(index, sequence, delta)]


async def _answer(
    head: CompletionHead,
    generation: Generation,
    builders: Sequence[ChoiceBuilder],
    n: int,
    has_timings: bool = False,
    fingerprint: str = "",
) -> Response:
    choices: list[bytes] = []
    for start in range(0, len(generation.sequences), generation.sequences_per_prompt):
        for index in likeliest(generation, start, n):
            choices.append(await builders[index].whole(len(choices), generation.sequences[index]))
            await asyncio.sleep(0)
    answer = Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[],
        usage=usage_of(generation),
        weight_version=generation.weight_version,
        system_fingerprint=fingerprint,
        timings=timings_of(generation) if has_timings else UNSET,
    )
    return WholeAnswer(answer, choices, generation.headers)


def likeliest(generation: Generation, start: int, n: int) -> list[int]:
    """Return the indexes of the `n` sequences to return for the prompt with sequences from `start` on: all in order, or if
    there are more, those with the highest cumulative log-probability, best first."""
    indexes = list(range(start, start + generation.sequences_per_prompt))
    if len(indexes) > n:
        indexes.sort(key=lambda index: generation.sequences[index].cumulative_logprob, reverse=True)
    return indexes[:n]


async def _text_of(prompt: Prompt, request: Request) -> str:
    """Return a prompt's text, for its echo."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    assert isinstance(prompt, TokensPrompt)
    return await RequestContext.of(request).services.client.detokenize(prompt.token_ids, request)
