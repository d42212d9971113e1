"""`GET /openapi.json`: the API described by the structs that parse its bodies and write its answers, so that it cannot drift
from them.

Runs in the api process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api import protocol, responses
from api.errors import json_response
from api.exchange import Exchange
from api.health import package_version

JSON = "application/json"
Schema = dict[str, Any]

_ERRORS = {
    400: "The request is wrong; the error names the parameter.",
    401: "A key is missing or wrong.",
    403: "Orders are not taken from here.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    409: "The order does not fit the engine's state.",
    413: "The body is too long.",
    429: "The engine takes no more at the moment; see Retry-After.",
    500: "An error of the server.",
    503: "An actor behind the API does not answer, or the server is stopping.",
}
_ANY = (400, 500)  # a malformed request id, an error of ours
_WITH_KEY = (*_ANY, 401)
_WITH_BODY = (*_WITH_KEY, 404, 408, 413, 429, 503)
_ORDERS = (*_ANY, 401, 403, 404, 408, 409, 413, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    path: str
    method: str
    summary: str
    answer: Any  # struct of the 200 answer; None: text
    errors: Sequence[int] = _ANY
    body: Any = None
    is_body_required: bool = True
    event: Any = None  # struct of an event, where the answer may be a stream
    media_type: str = JSON
    parameters: Sequence[str] = ()
    security: str = ""  # "api_key" | "admin_key"
    unavailable: Any = None  # struct of a 503 answer that is no error body


def operations() -> list[Operation]:
    key, admin = {"errors": _WITH_KEY, "security": "api_key"}, {"errors": _ORDERS, "security": "admin_key"}
    body = {"errors": _WITH_BODY, "security": "api_key"}
    order = {**admin, "is_body_required": False, "answer": responses.AdminAnswer}
    tokenize = protocol.TokenizeTextRequest | protocol.TokenizeChatRequest
    return [
        Operation("/", "get", "A page to chat and watch", None, media_type="text/html"),
        Operation("/v1/models", "get", "The served models", responses.ModelList, **key),
        Operation(
            "/v1/models/{id}",
            "get",
            "A served model",
            responses.Model,
            parameters=("id",),
            errors=(*_WITH_KEY, 404),
            security="api_key",
        ),
        Operation(
            "/v1/completions",
            "post",
            "Continue prompts",
            responses.Completion,
            body=protocol.CompletionRequest,
            event=responses.CompletionChunk,
            **body,
        ),
        Operation(
            "/v1/chat/completions",
            "post",
            "Answer a conversation",
            responses.ChatCompletion,
            body=protocol.ChatRequest,
            event=responses.ChatChunk,
            **body,
        ),
        Operation("/tokenize", "post", "A text or a conversation as token ids", responses.Tokenization, body=tokenize, **body),
        Operation(
            "/detokenize", "post", "Token ids as text", responses.Detokenization, body=protocol.DetokenizeRequest, **body
        ),
        Operation("/health", "get", "Whether the engine can serve", responses.Health, unavailable=responses.Health),
        Operation("/health/live", "get", "Whether this process answers", responses.Health),
        Operation("/load", "get", "Open, running and waiting samples", responses.Load),
        Operation("/version", "get", "The version of the engine", responses.Version),
        Operation("/metrics", "get", "All counters for Prometheus", None, media_type="text/plain"),
        Operation("/openapi.json", "get", "This document", dict[str, Any]),
        Operation("/admin/actors", "get", "The actor table", responses.AdminAnswer, **admin),
        Operation(
            "/admin/actors/{name}/restart",
            "post",
            "Restart an actor",
            body=protocol.EmptyRequest,
            parameters=("name",),
            **order,
        ),
        Operation("/admin/pause", "post", "Stop running samples", body=protocol.PauseRequest, **order),
        Operation("/admin/resume", "post", "Go on after a pause", body=protocol.EmptyRequest, **order),
        Operation("/admin/sleep", "post", "Pause and drop the weights", body=protocol.PauseRequest, **order),
        Operation("/admin/wake", "post", "Load the weights again and go on", body=protocol.EmptyRequest, **order),
        Operation("/admin/reset_prefix_cache", "post", "Forget cached prefixes", body=protocol.EmptyRequest, **order),
        Operation("/admin/reload", "post", "Change the weights in place", body=protocol.ReloadRequest, **order),
        Operation("/admin/clear_weights", "post", "Drop the weights", body=protocol.PauseRequest, **order),
        Operation("/admin/abort", "post", "End a request", responses.AdminAnswer, body=protocol.AbortRequestBody, **admin),
    ]


async def openapi(request: Request) -> Response:
    """The route."""
    return json_response(document(Exchange.of(request).services.model.names))


@cache
def document(model_names: tuple[str, ...]) -> Schema:
    described = operations()
    structs = [t for operation in described for t in (operation.answer, operation.body, operation.event) if t is not None]
    structs.append(responses.ErrorBody)
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, structs), schemas, strict=True))
    _name_models(components, model_names)
    paths: dict[str, dict[str, Schema]] = {}
    for operation in described:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schema_of)
    keys = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokamak",
            "version": package_version(),
            "description": "OpenAI's API, with vLLM's extensions, and an operator's orders under /admin.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"api_key": keys, "admin_key": keys}},
    }


def _described(operation: Operation, schema_of: dict[str, Schema]) -> Schema:
    answers = {str(status): _error(status) for status in operation.errors}
    answers["200"] = {"description": "Done", "headers": _headers(operation), "content": _content(operation, schema_of)}
    if operation.unavailable is not None:
        content = {JSON: {"schema": schema_of[repr(operation.unavailable)]}}
        answers["503"] = {"description": "Not now, and why", "content": content}
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').replace('/', '_') or 'page'}".replace("{", "").replace(
            "}", ""
        ),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in operation.parameters
        ],
        "responses": dict(sorted(answers.items())),
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.is_body_required,
            "content": {JSON: {"schema": schema_of[repr(operation.body)]}},
        }
    if operation.security:
        described["security"] = [{}, {operation.security: []}]  # a server without keys asks for none
    return described


def _content(operation: Operation, schema_of: dict[str, Schema]) -> Schema:
    schema = schema_of[repr(operation.answer)] if operation.answer is not None else {"type": "string"}
    content: Schema = {operation.media_type: {"schema": schema}}
    if operation.event is not None:
        event = schema_of[repr(operation.event)]["$ref"]
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": f"Events `data: {event}`, at the end `data: [DONE]`."}
        }
    return content


def _headers(operation: Operation) -> Schema:
    headers: Schema = {
        "x-request-id": {"description": "The request's id, the client's own where it sent one.", "schema": {"type": "string"}}
    }
    if operation.event is not None:
        headers["x-tokamak-weight-version"] = {
            "description": "The weights that made the answer (of a stream: its first token).",
            "schema": {"type": "string"},
        }
    return headers


def _error(status: int) -> Schema:
    return {"description": _ERRORS[status], "content": {JSON: {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}}


def _name_models(components: dict[str, Schema], model_names: tuple[str, ...]) -> None:
    """Say which values `model` takes here."""
    for component in components.values():
        model = component.get("properties", {}).get("model")
        if model is not None and "anyOf" in model:
            model["anyOf"] = [
                {**kind, "enum": list(model_names)} if kind.get("type") == "string" else kind for kind in model["anyOf"]
            ]
