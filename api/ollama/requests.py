"""Bodies of Ollama's API, with allowed ranges. `conversation.py` rejects unsupported fields by name. Unknown fields and options
are ignored, and so are those about loading a model (`num_ctx`, `num_gpu`, `keep_alive` and the like), because it is loaded
already."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api.schemas.pooling import PoolingRequest, Text
from api.schemas.requests import (
    MAX_INT32,
    AllowedToolChoice,
    NamedToolChoice,
    NumTopLogprobs,
    Seed,
    ToolDefinition,
    Word,
    Words,
)

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Nothing = Annotated[list[Any], Meta(max_length=0, description="Not supported.")]
KeepAlive = Annotated[int | float | str, Meta(description="No effect: the model stays loaded.")]
ModelName = Annotated[str, Meta(description="A name from /api/tags, with or without :latest; default: the first of them.")]


class OllamaOptions(msgspec.Struct, kw_only=True):
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_INT32, description="0 or less: up to the limit of the model.")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32, description="-1 or 0: all.")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: Word | Words | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: (
        Annotated[int, Meta(ge=-1, le=MAX_INT32, description="With a penalty only: 0 disables it, -1 counts all tokens.")]
        | None
    ) = None
    mirostat: Annotated[int, Meta(ge=0, le=0, description="Not supported: 0.")] | None = None
    tfs_z: Annotated[float, Meta(ge=1, le=1, description="Not supported: 1.")] | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Annotated[dict[str, Any] | str, Meta(description="A JSON object, or its text.")] = {}


class OllamaToolCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: str | None = None


class OllamaTurn(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(description="Base64; for vision-language models.")] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: Annotated[str | None, Meta(description="For tool results.")] = None
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """Fields of `/api/chat` and `/api/generate`."""

    model: ModelName | None = None
    stream: Annotated[bool, Meta(description="Default: true.")] | None = None
    options: OllamaOptions | None = None
    format: Annotated[Literal["json", ""] | dict[str, Any], Meta(description='"json", or a JSON schema.')] | None = None
    think: (
        Annotated[
            bool | Literal["low", "medium", "high", "max"],
            Meta(description="For models with reasoning; default: the template decides."),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs | None = None
    truncate: Annotated[bool, Meta(description="true: keep the end of a longer prompt; else: reject.")] | None = None
    shift: Annotated[bool, Meta(description="Not supported: false.")] | None = None
    keep_alive: KeepAlive | None = None

    @property
    def is_stream(self) -> bool:
        return self.stream is not False


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaTurn], Meta(description="Empty: the reply is empty.")] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice,
            Meta(description="Extension: as in /v1/chat/completions."),
        ]
        | None
    ) = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    suffix: Annotated[str, Meta(description="Text after the gap; for models with fill-in-the-middle tokens.")] | None = None
    system: str | None = None
    images: Annotated[list[str], Meta(description="Base64; for vision-language models.")] | None = None
    raw: Annotated[bool, Meta(description="Send the prompt to the model unchanged, without a template.")] | None = None
    template: Annotated[str, Meta(max_length=0, description="Not supported; use --chat-template.")] | None = None
    context: Nothing | None = None


class OllamaEmbedRequest(PoolingRequest, kw_only=True):
    model: ModelName | None = None
    input: Annotated[str | list[Text], Meta(description="Empty: no embeddings.")] | None = None
    truncate: (
        Annotated[bool, Meta(description="false: reject a text that is too long; otherwise truncate it at the end.")] | None
    ) = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT32, description="Keep only the first values.")] | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(PoolingRequest, kw_only=True):
    model: ModelName | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    model: ModelName | None = None
    name: Annotated[str, Meta(description="Former name of `model`.")] | None = None
    verbose: bool | None = None


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    model: ModelName | None = None
    name: Annotated[str, Meta(description="Former name of `model`.")] | None = None
    stream: bool | None = None
    insecure: bool | None = None
