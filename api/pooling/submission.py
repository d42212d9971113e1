"""Submits prompts for pooling, and returns the results. Used by the routes of this folder, in the api process.

Each prompt is a sequence that ends after it: `max_tokens` 0, and `Pooling` in its parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from starlette.requests import Request

from api.client.generation import Generation
from api.model import ServedModel
from api.request_context import ABORT_KEY, RequestContext, until_finished
from api.schemas.pooling import PoolingRequest
from api.schemas.requests import invalid
from api.submission import sequence_parts, shared_part, truncation_of
from engine.errors import RequestError
from engine.messages import Pooling, Prompt, PromptOptions, SamplingParams, TextOptions


def check_count(count: int, param: str, model: ServedModel) -> None:
    if count > model.max_sequences:
        raise invalid(param, f"{count} texts, but the limit per request is {model.max_sequences}; send fewer")


async def pooled(request: Request, body: PoolingRequest, prompts: Sequence[Prompt], pooling: Pooling, param: str) -> Generation:
    """Return the prompts' answers, in order: `OpenSequence.pooled` of each, float32. `param`: the field of the prompts. Raises
    RequestError and `ClientGone`."""
    context = RequestContext.of(request)
    options = PromptOptions(adapter=context.services.model.use_of(body.model))
    sampling = SamplingParams(max_tokens=0, pooling=pooling)
    num_kept, limit = truncation_of(body), context.services.model.max_model_len
    if num_kept > limit:
        raise invalid("truncate_prompt_tokens", f"{num_kept} exceeds the limit of the model, {limit} tokens; send less, or -1")
    text = TextOptions(return_prompt_token_ids=bool(body.return_token_ids), truncate_prompt_tokens=num_kept)
    generation = context.services.client.open(
        shared_part(request, body, sampling, text, options),
        prompts,
        sequence_parts(context.key, len(prompts), best_of=1),
        sequences_per_prompt=1,
        is_streaming=False,
        abort_connection=request.scope[ABORT_KEY],
    )
    context.opened(generation, prompts)
    try:
        await until_finished(generation, request.receive)
    except RequestError as error:
        if error.param == "prompt":
            error.param = param
        raise
    for sequence in generation.sequences:
        if not sequence.pooled:
            raise _unanswered(sequence.finish_reason)
    return generation


def numbers_of(pooled: bytes) -> list[float]:
    return array("f", pooled).tolist()


def _unanswered(finish_reason: str) -> RequestError:
    """Return the error for such an answer: it has nothing before its end."""
    if finish_reason == "timeout":
        return RequestError("the request timed out before its answer was complete", status=408, code="timeout")
    return RequestError("an operator aborted the request; send it again", status=409, code="aborted")
