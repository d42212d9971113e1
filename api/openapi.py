"""`GET /openapi.json`: a description of the API generated from the structs that parse its bodies and encode its answers, so
that it always matches them.

Runs in the api process.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.endpoint import JSON, LINES, Endpoint, Shapes, Type, found
from api.errors import json_response
from api.request_context import RequestContext
from api.routes import ENDPOINTS
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
    """Handle `GET /openapi.json`."""
    services = RequestContext.of(request).services
    return json_response(document(services.model.names, services.context.config.root_path))


@cache
def document(model_names: tuple[str, ...], root_path: str = "") -> Schema:
    """Return the document. `root_path`: path prefix under which a proxy serves the API."""
    bodies = [found(struct) for endpoint in ENDPOINTS for shape in endpoint.body for struct in shape]
    answers = [found(type_) for endpoint in ENDPOINTS for type_ in (endpoint.answer, endpoint.error) if type_ is not None]
    events = [struct for endpoint in ENDPOINTS for struct in _events(endpoint)]
    _, components = msgspec.json.schema_components([*bodies, *answers, *events], ref_template=_REFERENCE)
    _name_models(components, model_names)
    paths: dict[str, dict[str, Schema]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.public_path, {})[endpoint.method.lower()] = _described(endpoint)
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


def _described(endpoint: Endpoint) -> Schema:
    answers = {str(status): _error(status, endpoint) for status in endpoint.errors}
    if not endpoint.is_refused:
        answers["200"] = {"description": "Done", "headers": _headers(endpoint), "content": _content(endpoint)}
    if endpoint.accepted:
        answers["202"] = answers["200"] | {"description": endpoint.accepted}
    if endpoint.unavailable is not None:
        content = {JSON: {"schema": _reference(endpoint.unavailable)}}
        answers["503"] = {"description": "Engine unavailable, and the reason", "content": content}
    name = endpoint.public_path.strip("/").replace("/", "_")
    described: Schema = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}_{re.sub('[{}]', '', name) or 'page'}",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in endpoint.parameters
        ],
        "responses": dict(sorted(answers.items())),
    }
    if endpoint.body:
        described["requestBody"] = {
            "required": endpoint.is_body_required,
            "content": {JSON: {"schema": _one_of_shapes(endpoint.body)}},
        }
    if endpoint.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": _with_file(msgspec.json.schema(found(endpoint.form)))}},
        }
    if endpoint.security:
        described["security"] = [{}, {endpoint.security: []}]  # a server without keys requires none
    return described


def _with_file(schema: Schema) -> Schema:
    """Return the fields of a form with the file."""
    struct: Schema
    (struct,) = schema["$defs"].values()
    properties = struct["properties"] | {"file": {"type": "string", "contentMediaType": "application/octet-stream"}}
    return struct | {"properties": properties, "required": [*struct["required"], "file"]}


def _content(endpoint: Endpoint) -> Schema:
    schema = _reference(endpoint.answer) if endpoint.answer is not None else {"type": "string"}
    content: Schema = {endpoint.media_type: {"schema": schema}}
    if endpoint.event is not None:
        is_lines = endpoint.stream_type == LINES
        schema = _event(endpoint) if is_lines else _EVENT | {"properties": {"data": _event_data(endpoint)}}
        content[endpoint.stream_type] = {"schema": schema}
    return content


def _events(endpoint: Endpoint) -> tuple[Any, ...]:
    event = found(endpoint.event)
    return () if event is None else get_args(event) or (event,)


def _event(endpoint: Endpoint) -> Schema:
    """Return the schema of an event of the stream, or of the error that ended it."""
    return {"anyOf": [*map(_reference, _events(endpoint)), _reference(endpoint.error)]}


def _event_data(endpoint: Endpoint) -> Schema:
    """Return the schema of the data of an event; the last one is followed by the end mark."""
    event = {"type": "string", "contentMediaType": JSON, "contentSchema": _event(endpoint)}
    return {"anyOf": [{"const": "[DONE]"}, event]}


def _one_of_shapes(shapes: Shapes) -> Schema:
    alternatives: list[Schema] = [
        {"allOf": [_reference(struct) for struct in shape]} if len(shape) > 1 else _reference(shape[0]) for shape in shapes
    ]
    return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]


def _reference(type_: Type) -> Schema:
    struct = found(type_)
    if not isinstance(struct, type):
        return {"type": "object"}
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def _headers(endpoint: Endpoint) -> Schema:
    headers: Schema = {
        "x-request-id": {"description": "Request id; the client's own if it sent one.", "schema": {"type": "string"}}
    }
    if endpoint.event is not None:
        headers["x-tokamak-weight-version"] = {
            "description": "Version of the weights that made the answer (for a stream: its first token).",
            "schema": {"type": "string"},
        }
        headers["x-tokamak-replica"] = {
            "description": "Replica that made the answer; several if the sequences of a request ran on several.",
            "schema": {"type": "string"},
        }
        headers["x-tokamak-dropped"] = {
            "description": "Parts of the request that the model does not see, such as tools that its template lacks.",
            "schema": {"type": "string"},
        }
    return headers


def _error(status: int, endpoint: Endpoint) -> Schema:
    return {"description": _ERRORS[status], "content": {JSON: {"schema": _reference(endpoint.error)}}}


def _name_models(components: dict[str, Schema], model_names: tuple[str, ...]) -> None:
    """List the allowed values of `model`."""
    for component in components.values():
        model = component.get("properties", {}).get("model")
        if model is not None and "anyOf" in model:
            model["anyOf"] = [
                {**kind, "enum": list(model_names)} if kind.get("type") == "string" else kind for kind in model["anyOf"]
            ]
