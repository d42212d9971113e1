"""`POST /v1/embeddings`: texts or token ids as vectors, in OpenAI's shape. Runs in the api process."""

from __future__ import annotations

import asyncio
import base64
import time

from starlette.requests import Request
from starlette.responses import Response

from api.exchange import Exchange
from api.model import ServedModel
from api.openai.completions import prompts_of
from api.openai.usage import usage_of
from api.openai.whole import WholeAnswer
from api.pooling.submission import check_count, numbers_of, pooled
from api.schemas.pooling import Embedding, EmbeddingList, EmbeddingRequest
from api.schemas.requests import invalid
from api.schemas.responses import encoder
from engine.messages import Pooling


async def create_embeddings(request: Request) -> Response:
    """The route."""
    exchange = Exchange.of(request)
    model = exchange.services.model
    body = await exchange.parse(request, EmbeddingRequest)
    name = model.resolve(body.model)
    model.check_task("embed")
    prompts = prompts_of(body.input, model, body.add_special_tokens is not False, "input")
    check_count(len(prompts), "input", model)
    pooling = Pooling(dimensions_of(body.dimensions, model), body.normalize)
    generation = await pooled(request, body, prompts, pooling, "input")
    vectors: list[bytes] = []
    for index, sample in enumerate(generation.samples):
        is_base64 = body.encoding_format == "base64"
        vector = base64.b64encode(sample.pooled).decode() if is_base64 else numbers_of(sample.pooled)
        made = Embedding(index=index, embedding=vector)
        if body.return_token_ids:
            made.prompt_token_ids = sample.prompt_token_ids
        vectors.append(encoder.encode(made))
        await asyncio.sleep(0)
    answer = EmbeddingList(
        id=f"embd-{exchange.request_id}",
        created=int(time.time()),
        model=name,
        data=[],
        usage=usage_of(generation),
        weight_version=generation.weight_version,
    )
    return WholeAnswer(answer, vectors, generation.headers, "data")


def dimensions_of(asked: int | None, model: ServedModel) -> int:
    """0: all."""
    assert model.pooling is not None, "the model embeds"
    known = model.pooling.dimensions
    if asked is None:
        return 0
    if asked > model.pooling.num_values:
        raise invalid("dimensions", f"{asked} is more than the {model.pooling.num_values} that the model's vectors have")
    if known and asked not in known:
        raise invalid("dimensions", f"{asked} is none of those that the model was trained for: {', '.join(map(str, known))}")
    return asked
