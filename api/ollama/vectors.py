"""`POST /api/embed` and the older `/api/embeddings`: texts as vectors. Runs in the api process."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from api.client.generation import Generation
from api.errors import json_response
from api.ollama.answers import OllamaEmbedding, OllamaEmbeddings
from api.ollama.requests import OllamaEmbeddingsRequest, OllamaEmbedRequest
from api.openai.usage import usage_of
from api.openai.whole import WholeAnswer
from api.pooling.embeddings import dimensions_of
from api.pooling.submission import check_count, numbers_of, pooled
from api.request_context import RequestContext
from api.schemas.responses import encoder
from engine.messages import Pooling, TextPrompt

_SPARE_TOKENS = 8  # that a tokenizer may add to a text


async def embed(request: Request) -> Response:
    """Handle the route: return vectors of length 1, like Ollama."""
    context = RequestContext.of(request)
    model = context.services.model
    body = await context.parse(request, OllamaEmbedRequest)
    asked, body.model = body.model, model.resolve(body.model)
    model.check_task("embed")
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    check_count(len(texts), "input", model)
    dimensions = dimensions_of(body.dimensions, model)
    vectors: list[bytes] = []
    generation: Generation | None = None
    if any(texts):
        prompts = [TextPrompt(text if body.truncate is False else await _cut(request, text)) for text in texts]
        generation = await pooled(request, body, prompts, Pooling(dimensions, True), "input")
        for sequence in generation.sequences:
            vectors.append(encoder.encode(numbers_of(sequence.pooled)))
            await asyncio.sleep(0)
    answer = OllamaEmbeddings(
        model=asked or model.names[0],
        embeddings=[],
        total_duration=time.monotonic_ns() - context.arrival_ns,
        prompt_eval_count=usage_of(generation).prompt_tokens if generation else 0,
    )
    return WholeAnswer(answer, vectors, generation.headers if generation else {}, "embeddings")


async def embed_one(request: Request) -> Response:
    """Handle the older route: return a vector as defined by the model's files."""
    context = RequestContext.of(request)
    model = context.services.model
    body = await context.parse(request, OllamaEmbeddingsRequest)
    body.model = model.resolve(body.model)
    model.check_task("embed")
    if not body.prompt:
        return json_response(OllamaEmbedding(embedding=[]))
    generation = await pooled(request, body, [TextPrompt(await _cut(request, body.prompt))], Pooling(), "prompt")
    (sequence,) = generation.sequences
    return json_response(OllamaEmbedding(embedding=numbers_of(sequence.pooled)), headers=generation.headers)


async def _cut(request: Request, text: str) -> str:
    """Return the longest beginning of a text, in tokens, that fits the model."""
    services = RequestContext.of(request).services
    limit = services.model.max_model_len
    if len(text.encode()) + _SPARE_TOKENS <= limit:  # a token has at least one byte
        return text
    whole = len((await services.client.tokenize(TextPrompt(text), request)).token_ids) // 4
    if whole <= limit:
        return text
    token_ids = (await services.client.tokenize(TextPrompt(text, False), request)).token_ids
    num_kept = limit - (whole - len(token_ids) // 4)
    while num_kept > 0:  # a beginning may have more tokens than as part of the whole text
        beginning = (await services.client.detokenize(token_ids[: 4 * num_kept], request)).rstrip("\ufffd")
        num_tokens = len((await services.client.tokenize(TextPrompt(beginning), request)).token_ids) // 4
        if num_tokens <= limit:
            return beginning
        num_kept -= max(num_tokens - limit, num_kept // 64)
    return text
