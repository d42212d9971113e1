"""Information about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`; and commands that only Ollama supports. Runs
in the api process."""

from __future__ import annotations

import asyncio
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.model import LATEST, ServedModel
from api.ollama.answers import (
    OllamaCapability,
    OllamaDetails,
    OllamaModel,
    OllamaModelList,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShown,
    OllamaStatus,
    OllamaVersion,
)
from api.ollama.lines import rfc3339
from api.ollama.requests import OllamaPullRequest, OllamaShowRequest
from api.request_context import RequestContext, Services
from api.schemas.responses import encoder
from engine.errors import RequestError, TokamakError

if TYPE_CHECKING:
    from collections.abc import Iterator

SPOKEN_VERSION = "0.13.5"  # version of Ollama's API; clients check for a minimum
_NEVER = "2318-01-01T00:00:00Z"  # as Ollama reports for models that stay loaded
_LEVELS = {"bfloat16": "BF16", "float32": "F32"}


async def list_models(request: Request) -> Response:
    """Handle `GET /api/tags`."""
    services = RequestContext.of(request).services
    model = services.model
    files = await _files(model)
    digest, details = _digest(model), _details(services, files)
    modified_at = rfc3339(model.created)
    return json_response(
        OllamaModelList(
            models=[
                OllamaModel(
                    name=name, model=name, modified_at=modified_at, size=files.num_bytes, digest=digest, details=details
                )
                for name in map(tagged, model.served())
            ]
        )
    )


async def list_running(request: Request) -> Response:
    """Handle the route: list only the first name."""
    services = RequestContext.of(request).services
    model = services.model
    name, files = tagged(model.names[0]), await _files(model)
    running = OllamaRunningModel(
        name=name,
        model=name,
        size=files.num_bytes,
        digest=_digest(model),
        details=_details(services, files),
        expires_at=_NEVER,
        size_vram=0 if services.context.config.device == "cpu" else files.num_bytes,
        context_length=model.max_model_len,
    )
    return json_response(OllamaRunningModels(models=[running]))


async def show(request: Request) -> Response:
    """Handle `POST /api/show`."""
    context = RequestContext.of(request)
    services = context.services
    model, shape = services.model, services.model.shape
    body = await context.parse(request, OllamaShowRequest)
    model.resolve(body.model or body.name)
    defaults = {name: getattr(model.defaults, name) for name in model.defaults.__struct_fields__}
    family, files = shape.architecture, await _files(model)
    return json_response(
        OllamaShown(
            modelfile=f"FROM {model.path}\n",
            parameters="\n".join(f"{name} {value}" for name, value in defaults.items() if value is not None),
            template="",
            details=_details(services, files),
            model_info={
                "general.architecture": family,
                "general.parameter_count": files.num_weights,
                "general.basename": model.names[0],
                f"{family}.context_length": model.max_model_len,
                f"{family}.embedding_length": shape.hidden_size,
                f"{family}.block_count": shape.num_layers,
                f"{family}.attention.head_count": shape.num_attention_heads,
                f"{family}.attention.head_count_kv": shape.num_kv_heads,
                f"{family}.vocab_size": shape.vocab_size,
            },
            capabilities=[*_capabilities(services)],
            modified_at=rfc3339(model.created),
        )
    )


async def show_version(request: Request) -> Response:
    """Handle `GET /api/version`."""
    return json_response(OllamaVersion(SPOKEN_VERSION))


async def pull(request: Request) -> Response:
    """Handle the route: a served model is already present; others are rejected."""
    context = RequestContext.of(request)
    body = await context.parse(request, OllamaPullRequest)
    try:
        context.services.model.resolve(body.model or body.name)
    except RequestError:
        raise _cannot_change(request) from None
    success = OllamaStatus("success")
    if body.stream is False:
        return json_response(success)
    lines = (OllamaStatus("pulling manifest"), success)
    return Response(b"".join(encoder.encode(each) + b"\n" for each in lines), media_type="application/x-ndjson")


async def refuse(request: Request) -> Response:
    """Handle routes that would change the set of models."""
    raise _cannot_change(request)


def _cannot_change(request: Request) -> RequestError:
    names = ", ".join(RequestContext.of(request).services.model.names)
    return RequestError(
        (
            f"{request.url.path} is not supported: the model of this server ({names}) is chosen at startup with "
            "--model (a directory, a .gguf file, or owner/model on the Hugging Face hub); `tokamak models` lists "
            "and removes downloaded models"
        ),
        code="unsupported_operation",
    )


def tagged(name: str) -> str:
    """Return a model's name in Ollama's notation, always with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _capabilities(services: Services) -> Iterator[OllamaCapability]:
    model = services.model
    if model.pooling is not None:
        if model.pooling.task == "embed":
            yield "embedding"
        return
    yield "completion"
    if model.tool_call_parser not in ("none", "json"):
        yield "tools"
    if model.reasoning_parser != "none":
        yield "thinking"
    if model.media_kinds:
        yield "vision"


def _details(services: Services, files: _Files) -> OllamaDetails:
    model, config = services.model, services.context.config
    stored = model.shape.quantization
    level = config.quantization if config.quantization != "none" else stored.method if stored is not None else config.dtype
    return OllamaDetails(
        format=files.format,
        family=model.shape.architecture,
        families=[model.shape.architecture],
        parameter_size=_shortened(files.num_weights),
        quantization_level=_LEVELS.get(level, level.upper()),
    )


def _digest(model: ServedModel) -> str:
    return hashlib.sha256(model.path.encode("utf-8", "surrogateescape")).hexdigest()


class _Files(msgspec.Struct, frozen=True):
    """Files of a checkpoint that still exist."""

    format: Literal["gguf", "safetensors"] = "safetensors"
    num_bytes: int = 0
    num_weights: int = 0


async def _files(model: ServedModel) -> _Files:
    return await asyncio.to_thread(_files_at, Path(model.path))


@cache
def _files_at(place: Path) -> _Files:
    from engine.checkpoint.stored_weights import StoredWeights  # only needed here
    from engine.checkpoint.weight_files import weight_files

    try:
        files = [*weight_files(place), *place.glob("*.gguf")]
        is_gguf = any(file.suffix == ".gguf" for file in files)
        num_bytes = sum(file.stat().st_size for file in files)
        return _Files("gguf" if is_gguf else "safetensors", num_bytes, StoredWeights.read(place).num_values)
    except (OSError, TokamakError):
        return _Files()


def _shortened(number: int) -> str:
    """Return the size of a model in Ollama's notation."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)
