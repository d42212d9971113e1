"""Answers of Ollama's API. Encoded by msgspec; the OpenAPI document is generated from them. Durations are nanoseconds."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.schemas.responses import TokenLogprob

OllamaCapability = Literal["completion", "tools", "thinking", "vision", "embedding"]
DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaError(msgspec.Struct):
    error: str


class OllamaMadeFunction(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: msgspec.Raw  # a JSON object, as the model wrote it


class OllamaMadeCall(msgspec.Struct, kw_only=True):
    id: str
    function: OllamaMadeFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaMadeCall] | UnsetType = UNSET


class _OllamaAnswer(msgspec.Struct, kw_only=True):
    """A line of a stream, or a whole answer; the fields after `done` are only in the last line."""

    model: str
    created_at: str  # RFC 3339
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaChat(_OllamaAnswer, kw_only=True):
    message: OllamaMessage


class OllamaGeneration(_OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    name: str
    model: str  # the same
    modified_at: str
    size: int  # bytes of its files
    digest: str  # of its path: the same for all its names
    details: OllamaDetails


class OllamaModelList(msgspec.Struct, kw_only=True):
    models: list[OllamaModel]


class OllamaRunningModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct, kw_only=True):
    models: list[OllamaRunningModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[OllamaCapability]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    version: str


class OllamaStatus(msgspec.Struct):
    """A step of a command."""

    status: str
