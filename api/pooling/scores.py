"""`POST /v1/score`, `/v1/rerank` and `/v2/rerank`: how well texts match, in the formats of vLLM, Jina and Cohere.

Runs in the api process. A scoring model gets each pair as one prompt. With an embedding model the score is the cosine of the
two texts' vectors, each computed once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from api.client.generation import Generation
from api.errors import json_response
from api.model import ServedModel
from api.openai.usage import usage_of
from api.pooling.submission import check_count, numbers_of, pooled
from api.request_context import RequestContext
from api.schemas.pooling import (
    DocumentText,
    PoolingRequest,
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
)
from api.schemas.requests import invalid
from engine.messages import Pooling, TextPrompt

Pairs = Sequence[tuple[str, str]]


async def create_scores(request: Request) -> Response:
    """Handle the route of scores."""
    context = RequestContext.of(request)
    body = await context.parse(request, ScoreRequest)
    name = context.services.model.resolve(body.model)
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(firsts) not in (1, len(seconds)):
        raise invalid("text_1", f"{len(firsts)} texts do not match {len(seconds)} in text_2; send one, or as many")
    pairs = list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))
    filled = [index for index, pair in enumerate(pairs) if all(pair)]
    if not filled:
        raise invalid("text_2", "every pair has an empty text; send at least one pair without empty texts")
    scores, prompts, generation = await _scores(
        request, body, [pairs[index] for index in filled], body.use_activation, "text_2"
    )
    data = [Score(index=index, score=0.0) for index in range(len(pairs))]
    for index, score in zip(filled, scores, strict=True):
        data[index].score = score
    if prompts:
        found = dict(zip(filled, prompts, strict=True))
        for made in data:
            made.prompt_token_ids = found.get(made.index, [])
    return json_response(
        ScoreList(
            id=f"score-{context.request_id}",
            created=int(time.time()),
            model=name,
            data=data,
            usage=usage_of(generation),
            weight_version=generation.weight_version,
        ),
        headers=generation.headers,
    )


async def rerank(request: Request) -> Response:
    """Handle the route of ranks."""
    context = RequestContext.of(request)
    body = await context.parse(request, RerankRequest)
    name = context.services.model.resolve(body.model)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    filled = [index for index, text in enumerate(texts) if text]
    if not filled:
        raise invalid("documents", "all documents are empty; send at least one with text")
    pairs = [(body.query, texts[index]) for index in filled]
    found, made, generation = await _scores(request, body, pairs, body.use_activation, "documents")
    scores = dict.fromkeys(range(len(texts)), 0.0) | dict(zip(filled, found, strict=True))
    prompts = dict(zip(filled, made, strict=False))
    best = sorted(scores, key=lambda index: (not texts[index], -scores[index]))[: body.top_n or None]
    results = [RankedDocument(index=index, relevance_score=scores[index]) for index in best]
    if body.return_documents is not False:
        for result in results:
            result.document = DocumentText(text=texts[result.index])
    for result in results if prompts else ():
        result.prompt_token_ids = prompts.get(result.index, [])
    return json_response(
        Ranking(
            id=f"rerank-{context.request_id}",
            model=name,
            results=results,
            usage=usage_of(generation),
            weight_version=generation.weight_version,
        ),
        headers=generation.headers,
    )


async def _scores(
    request: Request, body: PoolingRequest, pairs: Pairs, is_finished: bool | None, param: str
) -> tuple[list[float], list[list[int]], Generation]:
    """Return a score for each pair, and the tokens if requested: those of both texts if each was computed alone."""
    model = RequestContext.of(request).services.model
    check_count(len(pairs), param, model)
    _check_model(model)
    assert model.pooling is not None
    if model.pooling.task == "classify":
        prompts = [TextPrompt(first, second=second) for first, second in pairs]
        generation = await pooled(request, body, prompts, Pooling(is_finished=is_finished), param)
        token_ids = [sequence.prompt_token_ids for sequence in generation.sequences]
        return [numbers_of(sequence.pooled)[0] for sequence in generation.sequences], _asked(body, token_ids), generation
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    check_count(len(texts), param, model)
    generation = await pooled(request, body, [TextPrompt(text) for text in texts], Pooling(), param)
    sequences = dict(zip(texts, generation.sequences, strict=True))
    vectors = {text: numbers_of(sequence.pooled) for text, sequence in sequences.items()}
    token_ids = [sequences[first].prompt_token_ids + sequences[second].prompt_token_ids for first, second in pairs]
    scores = []
    for first, second in pairs:
        scores.append(cosine(vectors[first], vectors[second]))
        await asyncio.sleep(0)
    return scores, _asked(body, token_ids), generation


def _asked(body: PoolingRequest, token_ids: list[list[int]]) -> list[list[int]]:
    return token_ids if body.return_token_ids else []


def _check_model(model: ServedModel) -> None:
    model.check_task("embed", "classify")
    if model.pooling is not None and model.pooling.task == "classify" and model.pooling.num_values != 1:
        raise invalid(
            "model", f"{model.names[0]} has {model.pooling.num_values} labels, but scores need a model with one; use /classify"
        )


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no direction."""
    product = math.fsum(x * y for x, y in zip(first, second, strict=True))
    lengths = math.hypot(*first) * math.hypot(*second)
    return product / lengths if lengths else 0.0
