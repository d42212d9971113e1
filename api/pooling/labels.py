"""`POST /classify`: labels of texts or of a conversation, in vLLM's format. Runs in the api process."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.openai.usage import usage_of
from api.pooling import prompts
from api.pooling.submission import numbers_of, pooled
from api.request_context import RequestContext
from api.schemas.pooling import Classification, ClassificationList, ClassificationRequest
from engine.messages import Pooling


async def classify(request: Request) -> Response:
    """Handle `POST /classify`."""
    context = RequestContext.of(request)
    model = context.services.model
    body, found, param = await prompts.read(request, ClassificationRequest)
    model.check_task("classify")
    model_name = model.resolve(body.model)
    generation = await pooled(request, body, found, Pooling(is_finished=body.use_activation), param)
    data = []
    for index, sequence in enumerate(generation.sequences):
        scores = numbers_of(sequence.pooled)
        label = max(range(len(scores)), key=scores.__getitem__)
        names = model.shape.labels
        name = names[label] if label < len(names) else f"LABEL_{label}"
        made = Classification(index=index, label=name, probs=scores, num_classes=len(scores))
        if body.return_token_ids:
            made.prompt_token_ids = sequence.prompt_token_ids
        data.append(made)
    answer = ClassificationList(
        id=f"classify-{context.request_id}",
        created=int(time.time()),
        model=model_name,
        data=data,
        usage=usage_of(generation),
        weight_version=generation.weight_version,
    )
    return json_response(answer, headers=generation.headers)
