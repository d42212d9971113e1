"""What clients ask about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`; and what only Ollama can do with them.
Runs in the api process.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from api.errors import json_response
from api.exchange import Exchange, Services
from api.model import ServedModel
from api.ollama.answers import (
    OllamaCapability,
    OllamaDetails,
    OllamaModel,
    OllamaModelList,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShown,
    OllamaVersion,
)
from api.ollama.lines import rfc3339
from api.ollama.requests import OllamaShowRequest
from engine.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

SPOKEN_VERSION = "0.12.11"  # of Ollama, whose API this is: clients ask for a least one
LATEST = ":latest"
_NEVER = "2318-01-01T00:00:00Z"  # as Ollama says of models that stay
_WEIGHTS = ("*.safetensors", "*.gguf")


async def list_models(request: Request) -> Response:
    """The route."""
    services = Exchange.of(request).services
    model = services.model
    size, digest, details = _size(model.path), _digest(model), _details(services)
    modified_at = rfc3339(model.created)
    return json_response(
        OllamaModelList(
            models=[
                OllamaModel(name=name, model=name, modified_at=modified_at, size=size, digest=digest, details=details)
                for name in map(tagged, model.names)
            ]
        )
    )


async def list_running(request: Request) -> Response:
    """The route: of all names the first."""
    services = Exchange.of(request).services
    model = services.model
    name, size = tagged(model.names[0]), _size(model.path)
    running = OllamaRunningModel(
        name=name,
        model=name,
        size=size,
        digest=_digest(model),
        details=_details(services),
        expires_at=_NEVER,
        size_vram=0 if services.context.config.device == "cpu" else size,
        context_length=model.max_model_len,
    )
    return json_response(OllamaRunningModels(models=[running]))


async def show(request: Request) -> Response:
    """The route."""
    exchange = Exchange.of(request)
    services = exchange.services
    model, shape = services.model, services.model.shape
    body = await exchange.parse(request, OllamaShowRequest)
    resolve(model, body.model or body.name)
    defaults = {name: getattr(model.defaults, name) for name in model.defaults.__struct_fields__}
    family = shape.architecture
    return json_response(
        OllamaShown(
            modelfile=f"FROM {model.path}\n",
            parameters="\n".join(f"{name} {value}" for name, value in defaults.items() if value is not None),
            template="",
            details=_details(services),
            model_info={
                "general.architecture": family,
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
    """The route."""
    return json_response(OllamaVersion(SPOKEN_VERSION))


async def refuse(request: Request) -> Response:
    """The route of all that changes which models there are."""
    names = ", ".join(Exchange.of(request).services.model.names)
    raise RequestError(
        f"{request.url.path}: this server's model ({names}) is chosen when it starts, with --model (a directory, a .gguf "
        "file, or owner/model of the Hugging Face hub); `tokamak models` lists and removes what was downloaded",
        code="unsupported_operation",
    )


def resolve(model: ServedModel, name: str | None) -> str:
    """The name that the answer carries: the one that was asked for. 404 for a model that is not served."""
    if name is None:
        return model.names[0]
    model.resolve(name if name in model.names else name.removesuffix(LATEST))
    return name


def tagged(name: str) -> str:
    """As Ollama calls a model: with a tag, in any case."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _capabilities(services: Services) -> Iterator[OllamaCapability]:
    model = services.model
    if model.pooling is not None:
        if model.pooling.task == "embed":
            yield "embedding"
        return
    yield "completion"
    if model.tool_call_parser != "none":
        yield "tools"
    if model.reasoning_parser != "none":
        yield "thinking"
    if model.shape.vision is not None and services.context.config.media_processes:
        yield "vision"


def _details(services: Services) -> OllamaDetails:
    model, config = services.model, services.context.config
    stored = model.shape.quantization
    level = config.quantization if config.quantization != "none" else stored.method if stored is not None else config.dtype
    return OllamaDetails(
        format="gguf" if model.path.endswith(".gguf") else "safetensors",
        family=model.shape.architecture,
        families=[model.shape.architecture],
        quantization_level=level.upper(),
    )


def _digest(model: ServedModel) -> str:
    return hashlib.sha256(model.path.encode("utf-8", "surrogateescape")).hexdigest()


@cache
def _size(path: str) -> int:
    """Of the weights' files, as long as they are there."""
    place = Path(path)
    files = [place] if place.is_file() else [file for pattern in _WEIGHTS for file in place.glob(pattern)]
    try:
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0
