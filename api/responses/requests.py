"""Bodies of the Responses API, with every range. What only OpenAI's servers can do is refused by name. Unknown fields are
ignored, and so are `metadata` and `user`, which come back, `service_tier`, `max_tool_calls` and `prompt_cache_key`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api.schemas.requests import FunctionName, NumTopLogprobs

JsonObject = dict[str, Any]
Nothing = Annotated[list[Any], Meta(max_length=0, description="Not supported.")]


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class PastText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str


class PastRefusal(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(msgspec.Struct, kw_only=True, tag_field="type", tag="input_image"):
    image_url: str
    detail: str | None = None


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | PastText | PastRefusal]


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class PastReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    summary: list[SummaryText] | None = None
    content: list[PastReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="JSON text of an object.")]


Output = str | list[InputText | InputImage]


class FunctionOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: Output


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    call_id: str
    name: str
    input: str


class CustomOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    call_id: str
    output: Output


InputItem = MessageItem | ReasoningItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | CustomOutputItem


class ResponseFunction(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[JsonObject | None, Meta(description="JSON Schema of an object.")] = None
    strict: Annotated[bool | None, Meta(description="Calls follow `parameters` to the letter.")] = None


class FreeText(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    pass


class GrammarFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class CustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: FunctionName
    description: str | None = None
    format: FreeText | GrammarFormat | None = None


class ChosenFunctionTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    name: FunctionName


class ChosenCustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: FunctionName


class ChosenTools(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunctionTool | ChosenCustomTool], Meta(min_length=1)]


class TextFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    schema: JsonObject
    name: str = "answer"
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Annotated[Literal["medium"], Meta(description="No other is supported.")] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[str, Meta(description="No effect: all of the thinking is in the item's content.")] | None = None


Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """What makes a prompt."""

    input: str | list[InputItem] | None = None
    model: Annotated[str, Meta(description="One of /v1/models; the first of them when not given.")] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    tools: list[ResponseFunction | CustomTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctionTool | ChosenCustomTool | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[Literal["disabled"], Meta(description="No other is supported.")] | None = None
    conversation: Annotated[str, Meta(max_length=0, description="Not supported.")] | None = None
    prompt: Annotated[dict[str, Any], Meta(max_length=0, description="Not supported: no prompts are kept here.")] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    stream: bool | None = None
    store: Annotated[bool, Meta(description="Whether it can be got, and gone on from; true when not given.")] | None = None
    include: list[Includable] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: NumTopLogprobs | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    user: str | None = None
    background: Annotated[bool, Meta(description="Not supported: false.")] | None = None
    context_management: Nothing | None = None
