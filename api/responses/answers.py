"""Answers of the Responses API: responses, their items, events. Encoded by msgspec; the OpenAPI document is generated from
them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.paging import Page

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []  # always empty
    logprobs: list[msgspec.Raw] = []  # `TokenLogprob`s


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


ItemPart = OutputText | ReasoningText


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class Reasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[str] = []  # always empty: the content has the complete reasoning
    content: list[ReasoningText]
    encrypted_content: str | None = None


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class OutputToolSearchCall(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    id: str
    status: ItemStatus
    call_id: str
    execution: Literal["client"] = "client"
    arguments: msgspec.Raw  # a JSON object, as the model wrote it


class ShellExec(msgspec.Struct, kw_only=True):
    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    working_directory: str | None = None


class OutputLocalShellCall(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    id: str
    status: ItemStatus
    call_id: str
    action: ShellExec


class OutputCompaction(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    id: str
    encrypted_content: str


OutputItem = (
    OutputMessage
    | Reasoning
    | OutputFunctionCall
    | OutputCustomCall
    | OutputToolSearchCall
    | OutputLocalShellCall
    | OutputCompaction
)


class CachedTokens(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningEcho(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class OpenAIResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningEcho
    store: bool
    temperature: float
    text: msgspec.Raw  # as it was sent
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class CompactedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[msgspec.Raw]  # the user's messages, and the summary
    usage: ResponseUsage | None


class InputItems(Page[dict[str, Any]]):
    """Items as they were sent, each with an id."""


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0  # from 0, without gaps; set when it is written


class _Lifecycle(_Event, kw_only=True):
    response: OpenAIResponse


class ResponseCreated(_Lifecycle, tag="response.created"):
    pass


class ResponseQueued(_Lifecycle, tag="response.queued"):
    pass


class ResponseInProgress(_Lifecycle, tag="response.in_progress"):
    pass


class ResponseCompleted(_Lifecycle, tag="response.completed"):
    pass


class ResponseIncomplete(_Lifecycle, tag="response.incomplete"):
    pass


class ResponseFailed(_Lifecycle, tag="response.failed"):
    pass


class _OfItem(_Event, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, tag="response.output_item.done"):
    pass


class _InItem(_Event, kw_only=True):
    output_index: int
    item_id: str


class PartAdded(_InItem, kw_only=True, tag="response.content_part.added"):
    content_index: Literal[0] = 0
    part: ItemPart


class PartDone(_InItem, kw_only=True, tag="response.content_part.done"):
    content_index: Literal[0] = 0
    part: ItemPart


class OutputTextDelta(_InItem, kw_only=True, tag="response.output_text.delta"):
    content_index: Literal[0] = 0
    delta: str
    logprobs: list[msgspec.Raw] = []  # `TokenLogprob`s


class OutputTextDone(_InItem, kw_only=True, tag="response.output_text.done"):
    content_index: Literal[0] = 0
    text: str
    logprobs: list[msgspec.Raw] = []  # `TokenLogprob`s


class ReasoningTextDelta(_InItem, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: Literal[0] = 0
    delta: str


class ReasoningTextDone(_InItem, kw_only=True, tag="response.reasoning_text.done"):
    content_index: Literal[0] = 0
    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_InItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_InItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
