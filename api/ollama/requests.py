"""Bodies of Ollama's API, with every range. What cannot be done is refused by name in `conversation.py`. Unknown fields and
options are ignored, and so are those that say how Ollama loads a model (`num_ctx`, `num_gpu`, `keep_alive` and the like): this
server's is loaded.
"""

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
KeepAlive = Annotated[int | float | str, Meta(description="Without effect: the model stays.")]
ModelName = Annotated[str, Meta(description="One of /api/tags, with or without :latest; the first of them when not given.")]


class OllamaOptions(msgspec.Struct, kw_only=True):
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_INT32, description="0 or less: up to the model's limit.")] | None = None
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
        Annotated[int, Meta(ge=-1, le=MAX_INT32, description="Where there is a penalty: 0, none of them acts; or -1, all.")]
        | None
    ) = None
    mirostat: Annotated[int, Meta(ge=0, le=0, description="Not supported: 0.")] | None = None
    tfs_z: Annotated[float, Meta(ge=1, le=1, description="Not supported: 1.")] | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Annotated[dict[str, Any] | str, Meta(description="An object, or its JSON text.")] = {}


class OllamaToolCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: str | None = None


class OllamaTurn(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(description="Base64; models that see.")] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: Annotated[str | None, Meta(description="Of a tool's result.")] = None
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What `/api/chat` and `/api/generate` have in common."""

    model: ModelName | None = None
    stream: Annotated[bool, Meta(description="When not given, true.")] | None = None
    options: OllamaOptions | None = None
    format: Annotated[Literal["json", ""] | dict[str, Any], Meta(description='"json", or a JSON schema.')] | None = None
    think: (
        Annotated[
            bool | Literal["low", "medium", "high", "max"],
            Meta(description="For models that think; else the template decides."),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs | None = None
    truncate: Annotated[bool, Meta(description="true: of a longer prompt the end counts. Else it is refused.")] | None = None
    shift: Annotated[bool, Meta(description="Not supported: false.")] | None = None
    keep_alive: KeepAlive | None = None

    @property
    def is_stream(self) -> bool:
        return self.stream is not False


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaTurn], Meta(description="Nothing: nothing is said.")] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice,
            Meta(description="Ours: as in /v1/chat/completions."),
        ]
        | None
    ) = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    suffix: Annotated[str, Meta(description="What comes behind the gap; models with tokens for that.")] | None = None
    system: str | None = None
    images: Annotated[list[str], Meta(description="Base64; models that see.")] | None = None
    raw: Annotated[bool, Meta(description="The prompt goes to the model as it is, without a template.")] | None = None
    template: Annotated[str, Meta(max_length=0, description="Not supported: --chat-template.")] | None = None
    context: Nothing | None = None


class OllamaEmbedRequest(PoolingRequest, kw_only=True):
    model: ModelName | None = None
    input: Annotated[str | list[Text], Meta(description="Nothing: no vectors.")] | None = None
    truncate: (
        Annotated[bool, Meta(description="false: a text that is too long is refused; else its beginning counts.")] | None
    ) = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT32, description="The first so many numbers.")] | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(PoolingRequest, kw_only=True):
    model: ModelName | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    model: ModelName | None = None
    name: Annotated[str, Meta(description="The older name of `model`.")] | None = None
    verbose: bool | None = None


class OllamaPullRequest(msgspec.Struct, kw_only=True):
    model: ModelName | None = None
    name: Annotated[str, Meta(description="The older name of `model`.")] | None = None
    stream: bool | None = None
    insecure: bool | None = None
