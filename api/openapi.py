"""`GET /openapi.json`: the API described by the structs that parse its bodies and write its answers, so that it cannot drift
from them.

Runs in the api process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.operations import JSON, LINES, OPERATIONS, Operation, Shapes
from api.request_context import RequestContext
from engine.installation import package_version

Schema = dict[str, Any]

_EVENT = {"type": "object", "required": ["data"]}
_REFERENCE = "#/components/schemas/{name}"

_ERRORS = {
    400: "The request is invalid; the error names the parameter.",
    401: "The API key is missing or invalid.",
    403: "The origin or host is not allowed, or /admin is disabled (no --admin-key).",
    404: "Not found.",
    408: "The body arrived too slowly.",
    409: "The command does not fit the state of the engine, or an operator aborted the request.",
    413: "The body is too large.",
    429: "The engine is overloaded; see Retry-After.",
    431: "The request head is too large.",
    500: "Server error.",
    507: "The disk is full.",
    503: "An actor behind the API does not respond, or the server is stopping.",
}


async def openapi(request: Request) -> Response:
    """The route."""
    services = RequestContext.of(request).services
    return json_response(document(services.model.names, services.context.config.root_path))


@cache
def document(model_names: tuple[str, ...], root_path: str = "") -> Schema:
    """`root_path`: below which a proxy shows it."""
    bodies = [struct for operation in OPERATIONS for shape in operation.body for struct in shape]
    answers = [t for operation in OPERATIONS for t in (operation.answer, operation.error, *_events(operation)) if t is not None]
    _, components = msgspec.json.schema_components([*bodies, *answers], ref_template=_REFERENCE)
    _name_models(components, model_names)
    paths: dict[str, dict[str, Schema]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    keys = {"type": "http", "scheme": "bearer"}  # or x-api-key
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokamak",
            "version": package_version(),
            "description": (
                "The OpenAI API with the extensions of vLLM, the Anthropic and Ollama APIs, and operator commands under /admin."
            ),
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"api_key": keys, "admin_key": keys}},
    }


def _described(operation: Operation) -> Schema:
    answers = {str(status): _error(status, operation) for status in operation.errors}
    if not operation.is_refused:
        answers["200"] = {"description": "Done", "headers": _headers(operation), "content": _content(operation)}
    if operation.accepted:
        answers["202"] = answers["200"] | {"description": operation.accepted}
    if operation.unavailable is not None:
        content = {JSON: {"schema": _reference(operation.unavailable)}}
        answers["503"] = {"description": "Engine unavailable, and the reason", "content": content}
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
    if operation.body:
        described["requestBody"] = {
            "required": operation.is_body_required,
            "content": {JSON: {"schema": _one_of_shapes(operation.body)}},
        }
    if operation.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": _with_file(msgspec.json.schema(operation.form))}},
        }
    if operation.security:
        described["security"] = [{}, {operation.security: []}]  # a server without keys asks for none
    return described


def _with_file(schema: Schema) -> Schema:
    """A form's fields, and the file beside them."""
    struct: Schema
    (struct,) = schema["$defs"].values()
    properties = struct["properties"] | {"file": {"type": "string", "contentMediaType": "application/octet-stream"}}
    return struct | {"properties": properties, "required": [*struct["required"], "file"]}


def _content(operation: Operation) -> Schema:
    schema = _reference(operation.answer) if operation.answer is not None else {"type": "string"}
    content: Schema = {operation.media_type: {"schema": schema}}
    if operation.event is not None:
        is_lines = operation.stream_type == LINES
        schema = _event(operation) if is_lines else _EVENT | {"properties": {"data": _event_data(operation)}}
        content[operation.stream_type] = {"schema": schema}
    return content


def _events(operation: Operation) -> tuple[Any, ...]:
    return operation.event if isinstance(operation.event, tuple) else (operation.event,)


def _event(operation: Operation) -> Schema:
    """A piece of the answer, or the error that ended it."""
    return {"anyOf": [*map(_reference, _events(operation)), _reference(operation.error)]}


def _event_data(operation: Operation) -> Schema:
    """After the last of them comes the end mark."""
    event = {"type": "string", "contentMediaType": JSON, "contentSchema": _event(operation)}
    return {"anyOf": [{"const": "[DONE]"}, event]}


def _one_of_shapes(shapes: Shapes) -> Schema:
    alternatives: list[Schema] = [
        {"allOf": [_reference(struct) for struct in shape]} if len(shape) > 1 else _reference(shape[0]) for shape in shapes
    ]
    return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]


def _reference(struct: Any) -> Schema:
    if not isinstance(struct, type):
        return {"type": "object"}
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def _headers(operation: Operation) -> Schema:
    headers: Schema = {
        "x-request-id": {"description": "Request id; the client's own if it sent one.", "schema": {"type": "string"}}
    }
    if operation.event is not None:
        headers["x-tokamak-weight-version"] = {
            "description": "Version of the weights that made the answer (for a stream: its first token).",
            "schema": {"type": "string"},
        }
        headers["x-tokamak-replica"] = {
            "description": "Replica that made the answer; several if the sequences of a request ran on several.",
            "schema": {"type": "string"},
        }
    return headers


def _error(status: int, operation: Operation) -> Schema:
    return {"description": _ERRORS[status], "content": {JSON: {"schema": _reference(operation.error)}}}


def _name_models(components: dict[str, Schema], model_names: tuple[str, ...]) -> None:
    """Say which values `model` takes here."""
    for component in components.values():
        model = component.get("properties", {}).get("model")
        if model is not None and "anyOf" in model:
            model["anyOf"] = [
                {**kind, "enum": list(model_names)} if kind.get("type") == "string" else kind for kind in model["anyOf"]
            ]
