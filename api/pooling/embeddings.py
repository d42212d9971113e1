"""`POST /v1/embeddings`, in OpenAI's format, and `POST /pooling`, in vLLM's: vectors or scores of texts, token ids or a
conversation. Runs in the api process."""

from __future__ import annotations

import asyncio
import base64
import time

from starlette.requests import Request
from starlette.responses import Response

from api.model import ServedModel
from api.openai.usage import usage_of
from api.openai.whole import WholeAnswer
from api.pooling import prompts
from api.pooling.submission import numbers_of, pooled
from api.request_context import RequestContext
from api.schemas.pooling import Embedding, EmbeddingList, EmbeddingRequest, Pooled, PooledList, PoolRequest
from api.schemas.requests import invalid
from api.schemas.responses import encoder
from engine.messages import Pooling, Prompt


async def create_embeddings(request: Request) -> Response:
    """Handle the route of vectors."""
    body, found, param = await prompts.read(request, EmbeddingRequest)
    model = RequestContext.of(request).services.model
    model.check_task("embed")
    pooling = Pooling(dimensions_of(body.dimensions, model), body.normalize)
    return await _answer(request, body, found, param, pooling, Embedding, "embd")


async def pool(request: Request) -> Response:
    """Handle the route for any output of the model."""
    body, found, param = await prompts.read(request, PoolRequest)
    model = RequestContext.of(request).services.model
    if body.task is None:
        model.check_task("embed", "classify")
    else:
        model.check_task(body.task)
    assert model.pooling is not None
    if model.pooling.task == "embed":
        pooling = Pooling(dimensions_of(body.dimensions, model), body.normalize)
    elif body.dimensions is not None:
        raise invalid("dimensions", "this model returns scores, which cannot be shortened; remove it")
    else:
        pooling = Pooling(is_finished=body.use_activation)
    return await _answer(request, body, found, param, pooling, Pooled, "pool")


async def _answer(
    request: Request,
    body: EmbeddingRequest,
    found: list[Prompt],
    param: str,
    pooling: Pooling,
    type_: type[Embedding] | type[Pooled],
    prefix: str,
) -> Response:
    context = RequestContext.of(request)
    name = context.services.model.resolve(body.model)
    generation = await pooled(request, body, found, pooling, param)
    made: list[bytes] = []
    for index, sequence in enumerate(generation.sequences):
        is_base64 = body.encoding_format == "base64"
        values = base64.b64encode(sequence.pooled).decode() if is_base64 else numbers_of(sequence.pooled)
        one = Embedding(index=index, embedding=values) if type_ is Embedding else Pooled(index=index, data=values)
        if body.return_token_ids:
            one.prompt_token_ids = sequence.prompt_token_ids
        made.append(encoder.encode(one))
        await asyncio.sleep(0)
    answer_type = EmbeddingList if type_ is Embedding else PooledList
    answer = answer_type(
        id=f"{prefix}-{context.request_id}",
        created=int(time.time()),
        model=name,
        data=[],
        usage=usage_of(generation),
        weight_version=generation.weight_version,
    )
    return WholeAnswer(answer, made, generation.headers, "data")


def dimensions_of(asked: int | None, model: ServedModel) -> int:
    """Return the size of the vectors; 0: all values."""
    assert model.pooling is not None, "the model embeds"
    known = model.pooling.dimensions
    if asked is None:
        return 0
    if asked > model.pooling.num_values:
        raise invalid("dimensions", f"{asked} exceeds the {model.pooling.num_values} dimensions of this model; lower it")
    if known and asked not in known:
        raise invalid("dimensions", f"{asked} is not supported by the model; use one of {', '.join(map(str, known))}")
    return asked
