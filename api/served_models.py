"""`GET /v1/models` and `/v1/models/{id}`, in OpenAI's or Anthropic's format."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from api.anthropic import errors as anthropic_errors
from api.errors import json_response
from api.request_context import RequestContext, Services
from api.schemas.responses import Model, ModelList
from engine.messages import Adapter


async def list_models(request: Request) -> Response:
    services = RequestContext.of(request).services
    model = services.model
    if anthropic_errors.is_spoken(request.url.path, request.headers):
        from api.anthropic import models as anthropic_models  # on first use

        return json_response(anthropic_models.page(model, request.query_params))
    return json_response(ModelList(data=[_card(services, name, adapter) for name, adapter in model.served().items()]))


async def show_model(request: Request) -> Response:
    services = RequestContext.of(request).services
    model = services.model
    name, adapter = model.find(request.path_params["id"])
    if anthropic_errors.is_spoken(request.url.path, request.headers):
        from api.anthropic import models as anthropic_models

        return json_response(anthropic_models.card(model, name))
    return json_response(_card(services, name, adapter))


def _card(services: Services, name: str, adapter: Adapter | None) -> Model:
    fingerprint = services.fingerprints.current(None if adapter is None else adapter.use)
    return services.model.card(name, adapter, fingerprint)
