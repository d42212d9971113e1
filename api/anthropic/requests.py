"""Bodies of Anthropic's API, with allowed ranges. `conversation.py` rejects by name what only Anthropic's servers can do.
Unknown fields are ignored, and so are `cache_control`, `metadata`, `service_tier` and the like: prefixes are cached anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta

from api.schemas.requests import FunctionName, NumTokens, Words

Nothing = Annotated[list[Any], Meta(max_length=0, description="Not supported.")]
JsonObject = dict[str, Any]


class Citations(msgspec.Struct, kw_only=True):
    enabled: Annotated[bool, Meta(description="Not supported: false.")] = False


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class Base64Source(msgspec.Struct, kw_only=True, tag_field="type", tag="base64"):
    media_type: Annotated[str, Meta(pattern=r"^[a-z]+/[a-z0-9.+-]+$", max_length=64)]
    data: str


class UrlSource(msgspec.Struct, kw_only=True, tag_field="type", tag="url"):
    url: str


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class PlainTextSource(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    data: str


class BlocksSource(msgspec.Struct, kw_only=True, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock]


class PdfSource(msgspec.Struct, kw_only=True, tag_field="type", tag="base64"):
    """Rejected with an alternative, like the two below."""

    media_type: str = "application/pdf"
    data: str = ""


class PdfUrlSource(msgspec.Struct, kw_only=True, tag_field="type", tag="url"):
    url: str = ""


class FileSource(msgspec.Struct, kw_only=True, tag_field="type", tag="file"):
    file_id: str = ""


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    source: PlainTextSource | BlocksSource | PdfSource | PdfUrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]
    citations: Citations | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: Annotated[str, Meta(description="Redacted by another server; ignored.")]


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: JsonObject


class ToolReferenceBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """A tool that a search found: it is in the prompt from here on."""

    tool_name: str


class BrowserStateBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="browser_state"):
    """The state of a browser, reported by a client's tool."""

    tabs: list[Any] = []
    state_changes: list[Any] | None = None


class CompactionBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    """A summary of earlier messages, created by another server."""

    content: str | None = None


class ServerToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="server_tool_use"):
    """A call that another server made and ran; in the prompt with its result, like those below."""

    id: str
    name: str
    input: JsonObject = {}


class McpToolUseBlock(ServerToolUseBlock, kw_only=True, tag_field="type", tag="mcp_tool_use"):
    pass


class ServerToolResult(msgspec.Struct, kw_only=True):
    tool_use_id: str
    content: Any = None


SERVER_TOOL_RESULTS = {
    "WebSearchResultBlock": "web_search_tool_result",
    "WebFetchResultBlock": "web_fetch_tool_result",
    "ToolSearchResultBlock": "tool_search_tool_result",
    "CodeResultBlock": "code_execution_tool_result",
    "BashResultBlock": "bash_code_execution_tool_result",
    "EditorResultBlock": "text_editor_code_execution_tool_result",
    "McpResultBlock": "mcp_tool_result",
}

if TYPE_CHECKING:
    AnyServerToolResult = ServerToolResult
else:
    AnyServerToolResult = Union[  # noqa: UP007
        tuple(
            msgspec.defstruct(name, [], bases=(ServerToolResult,), module=__name__, kw_only=True, tag_field="type", tag=tag)
            for name, tag in SERVER_TOOL_RESULTS.items()
        )
    ]


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: (
        str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | BrowserStateBlock] | None
    ) = None
    is_error: bool | None = None


UserBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock | ToolReferenceBlock
ServerBlock = ServerToolUseBlock | McpToolUseBlock | AnyServerToolResult
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | CompactionBlock | ServerBlock


class UserTurn(msgspec.Struct, kw_only=True, tag_field="role", tag="user"):
    content: str | list[UserBlock]


class AssistantTurn(msgspec.Struct, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[AssistantBlock]


class SystemTurn(msgspec.Struct, kw_only=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]


class Tool(msgspec.Struct, kw_only=True):
    name: FunctionName
    type: Annotated[str, Meta(description='Only "custom": tools run by Anthropic are not available.')] | None = None
    description: str | None = None
    input_schema: Annotated[JsonObject, Meta(description="JSON schema of type object.")] | None = None
    strict: Annotated[bool, Meta(description="Calls follow `input_schema` exactly.")] | None = None
    defer_loading: Annotated[bool, Meta(description="Only in the prompt after a `tool_reference`.")] | None = None
    input_examples: Annotated[list[JsonObject], Meta(description="Added to the prompt as `examples` of the schema.")] | None = (
        None
    )


class ToolChoiceAuto(msgspec.Struct, kw_only=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(msgspec.Struct, kw_only=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(msgspec.Struct, kw_only=True, tag_field="type", tag="tool"):
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(msgspec.Struct, kw_only=True, tag_field="type", tag="none"):
    pass


Display = Literal["summarized", "omitted"]


class ThinkingEnabled(msgspec.Struct, kw_only=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[NumTokens, Meta(description="Maximum number of reasoning tokens.")]
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, kw_only=True, tag_field="type", tag="adaptive"):
    display: Display | None = None


class ThinkingBetweenTools(msgspec.Struct, kw_only=True, tag_field="type", tag="between_tools"):
    pass


class ThinkingDisabled(msgspec.Struct, kw_only=True, tag_field="type", tag="disabled"):
    pass


class JsonFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    schema: JsonObject


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ContextEdit(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(description="clear_tool_uses_* and clear_thinking_* are accepted, others are rejected.")]
    keep: Any = None
    trigger: Any = None
    clear_at_least: Any = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ContextManagement(msgspec.Struct, kw_only=True):
    edits: list[ContextEdit] = []


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Fields that determine the prompt."""

    messages: Annotated[list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1)]
    model: Annotated[str, Meta(description="A name from /v1/models; default: the first of them.")] | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingBetweenTools | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonFormat | None, Meta(description="Former name of `output_config.format`.")] = None
    mcp_servers: Nothing | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[NumTokens, Meta(description="Lowered to the free context; 0: only cache the prompt.")]
    stream: bool | None = None
    stop_sequences: Words | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    container: Annotated[str, Meta(max_length=0, description="Not supported.")] | None = None
