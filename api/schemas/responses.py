"""Response bodies of the HTTP API, in OpenAI's and vLLM's format.

Created by the api process's route handlers, encoded by msgspec; the OpenAPI document is generated from the same structs.
`UNSET` fields are left out of the JSON.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.metric_labels import EngineState

FinishReason = Literal["stop", "tool_calls", "length", "repetition", "abort", "timeout"]

encoder = msgspec.json.Encoder()


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of a prediction that are in the answers, and those that are not; reasoning tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptProgress(msgspec.Struct):
    """Progress of the prompts in tokens and milliseconds, as in llama.cpp, including cached tokens."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Timings(msgspec.Struct):
    """Tokens and milliseconds of a request so far, as in llama.cpp: of its prompts from arrival to the first token, including
    waiting, and of its answers from then on."""

    cache_n: int
    prompt_n: int  # without cached ones
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of `/v1/completions`, whole or as one piece of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    logprobs_by_id: PromptLogprobs | UnsetType = UNSET  # instead of `logprobs`


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    weight_version: str
    system_fingerprint: str = ""
    timings: Timings | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # JSON text


class MadeCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CalledCustomTool(msgspec.Struct):
    name: str
    input: str


class MadeCustomCall(msgspec.Struct, tag_field="type", tag="custom"):
    id: str
    custom: CalledCustomTool


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same text
    tool_calls: list[MadeCall | MadeCustomCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    logprobs_by_id: PromptLogprobs | UnsetType = UNSET  # instead of `logprobs`


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    weight_version: str
    system_fingerprint: str = ""
    timings: Timings | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(msgspec.Struct):
    """A call's id, type and name come first, then its arguments, or the input of a custom tool."""

    index: int
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same text
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a `/v1/completions` stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a `/v1/chat/completions` stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokamak"
    root: str
    parent: str | None = None  # of an adapter: its base model
    max_model_len: int
    end_token_ids: list[int] = []  # from the model's configuration
    tool_call_parser: str
    reasoning_parser: str
    system_fingerprint: str = ""
    input_modalities: list[str]  # allowed in messages: "text", "image", "video"


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenization(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenization(msgspec.Struct):
    prompt: str


class HealthProblem(msgspec.Struct):
    actor: str
    reason: str


class RouterEngine(msgspec.Struct):
    """An engine of a router."""

    address: str
    state: EngineState
    replicas: list[int] = []


class Health(msgspec.Struct, kw_only=True):
    status: Literal["ok", "unavailable"]
    actor: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    problems: list[HealthProblem] = []
    engines: list[RouterEngine] | UnsetType = UNSET  # of a router


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Version(msgspec.Struct):
    version: str


class ReplicaLoad(msgspec.Struct):
    replica: int
    running: int
    waiting: int
    tokens_to_compute: int  # of their prompts
    max_num_seqs: int
    free_slots: int
    max_num_batched_tokens: int
    kv_blocks: int
    free_kv_blocks: int


class Load(msgspec.Struct):
    server_load: int
    running: int
    waiting: int
    replicas: list[ReplicaLoad] = []
    engines: list[RouterEngine] | UnsetType = UNSET  # of a router


class ActorLog(msgspec.Struct):
    actor: str
    text: str


class AdminAnswer(msgspec.Struct):
    """Result of a command; the other fields depend on the command (such as `actors` for the actor table)."""

    message: str


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """A conversation as the model receives it."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
