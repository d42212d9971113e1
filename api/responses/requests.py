"""Bodies of the Responses API, with allowed ranges. Tools and items that only OpenAI's servers produce are accepted and left
out of the prompt, or become text (`conversation.py`). Unknown fields are ignored, and so are `service_tier`, `max_tool_calls`,
`prompt_cache_key`, and `metadata` and `user`, which are returned."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api.responses.hosted import HostedItem
from api.responses.tools import ChosenTool, ChosenTools, JsonObject, Tool
from api.schemas.requests import NumTopLogprobs

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


class EncryptedText(msgspec.Struct, kw_only=True, tag_field="type", tag="encrypted_content"):
    encrypted_content: Annotated[str, Meta(description="From another server: ignored.")]


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | PastText | PastRefusal | EncryptedText]


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
    namespace: str | None = None


Output = str | list[InputText | InputImage | EncryptedText]


class FunctionOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: Output


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CustomOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    call_id: str
    output: Output


class ShellAction(msgspec.Struct, kw_only=True, omit_defaults=True):
    command: list[str] = []
    working_directory: str | None = None
    timeout_ms: int | None = None


class LocalShellCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    action: ShellAction
    call_id: str | None = None
    id: str | None = None


class LocalShellOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call_output"):
    output: str
    call_id: str | None = None
    id: str | None = None


class ToolSearchCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    arguments: Any = None
    call_id: str | None = None


class ToolSearchOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_output"):
    tools: list[Tool] = []
    call_id: str | None = None


class AdditionalToolsItem(msgspec.Struct, kw_only=True, tag_field="type", tag="additional_tools"):
    tools: list[Tool] = []


class CompactionItem(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    encrypted_content: Annotated[str, Meta(description="Summary; from another server: ignored.")] | None = None


class CompactionSummaryItem(CompactionItem, kw_only=True, tag_field="type", tag="compaction_summary"):
    """Former name of `compaction`."""


class ContextCompactionItem(CompactionItem, kw_only=True, tag_field="type", tag="context_compaction"):
    pass


class CompactionTriggerItem(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction_trigger"):
    """Ask for a `compaction` item as the answer: a summary of everything before."""


class ItemReference(msgspec.Struct, kw_only=True, tag_field="type", tag="item_reference"):
    id: Annotated[str, Meta(max_length=256, description="Of an item in a stored response; ignored if it does not exist.")]


class AgentMessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="agent_message"):
    author: str | None = None
    recipient: str | None = None
    content: str | list[InputText | InputImage | EncryptedText] = ""


InputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | LocalShellCallItem
    | LocalShellOutputItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
    | AdditionalToolsItem
    | CompactionItem
    | CompactionSummaryItem
    | ContextCompactionItem
    | CompactionTriggerItem
    | ItemReference
    | AgentMessageItem
    | HostedItem
)


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
    verbosity: Annotated[Literal["low", "medium", "high"], Meta(description="For templates that support it.")] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[str, Meta(description="No effect: the item has the complete reasoning.")] | None = None


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
    """Fields that determine the prompt."""

    input: str | list[InputItem] | None = None
    model: Annotated[str, Meta(description="A name from /v1/models; default: the first of them.")] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Meta(description="auto: drop the oldest items if the input is too long.")] | None
    ) = None
    conversation: Annotated[str, Meta(max_length=0, description="Not supported.")] | None = None
    prompt: Annotated[dict[str, Any], Meta(max_length=0, description="Not supported: no prompts are stored.")] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    stream: bool | None = None
    store: Annotated[bool, Meta(description="Keep the response for later requests; default: true.")] | None = None
    include: list[Includable] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: NumTopLogprobs | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    user: str | None = None
    background: Annotated[bool, Meta(description="Return at once and continue in the background; needs `store`.")] | None = None
    context_management: Nothing | None = None
