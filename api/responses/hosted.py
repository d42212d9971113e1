"""Items of tools that another server ran: calls that contain their results. They become a call and its result."""

from __future__ import annotations

from typing import Any

import msgspec

_SHOWN = ("name", "action", "queries", "query", "code", "arguments", "operation")
_RESULTS = ("output", "outputs", "results", "tools", "error")


class HostedFields(msgspec.Struct, kw_only=True):
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    action: Any = None
    queries: Any = None
    query: Any = None
    code: Any = None
    arguments: Any = None
    operation: Any = None
    output: Any = None
    outputs: Any = None
    results: Any = None
    tools: Any = None
    error: Any = None


class WebSearchCallItem(HostedFields, tag_field="type", tag="web_search_call"):
    pass


class FileSearchCallItem(HostedFields, tag_field="type", tag="file_search_call"):
    pass


class CodeInterpreterCallItem(HostedFields, tag_field="type", tag="code_interpreter_call"):
    pass


class ImageGenerationCallItem(HostedFields, tag_field="type", tag="image_generation_call"):
    pass


class McpCallItem(HostedFields, tag_field="type", tag="mcp_call"):
    pass


class McpListToolsItem(HostedFields, tag_field="type", tag="mcp_list_tools"):
    pass


class McpApprovalRequestItem(HostedFields, tag_field="type", tag="mcp_approval_request"):
    pass


class McpApprovalResponseItem(HostedFields, tag_field="type", tag="mcp_approval_response"):
    pass


class ComputerCallItem(HostedFields, tag_field="type", tag="computer_call"):
    pass


class ComputerCallOutputItem(HostedFields, tag_field="type", tag="computer_call_output"):
    pass


class ShellCallItem(HostedFields, tag_field="type", tag="shell_call"):
    pass


class ShellCallOutputItem(HostedFields, tag_field="type", tag="shell_call_output"):
    pass


class ApplyPatchCallItem(HostedFields, tag_field="type", tag="apply_patch_call"):
    pass


class ApplyPatchCallOutputItem(HostedFields, tag_field="type", tag="apply_patch_call_output"):
    pass


class ProgramItem(HostedFields, tag_field="type", tag="program"):
    pass


class ProgramOutputItem(HostedFields, tag_field="type", tag="program_output"):
    result: Any = None


class ConfigurationUpdateItem(HostedFields, tag_field="type", tag="configuration_update"):
    pass


HostedItem = (
    WebSearchCallItem
    | FileSearchCallItem
    | CodeInterpreterCallItem
    | ImageGenerationCallItem
    | McpCallItem
    | McpListToolsItem
    | McpApprovalRequestItem
    | McpApprovalResponseItem
    | ComputerCallItem
    | ComputerCallOutputItem
    | ShellCallItem
    | ShellCallOutputItem
    | ApplyPatchCallItem
    | ApplyPatchCallOutputItem
    | ProgramItem
    | ProgramOutputItem
    | ConfigurationUpdateItem
)
_LEFT_OUT = (McpListToolsItem, McpApprovalRequestItem, McpApprovalResponseItem, ConfigurationUpdateItem)


def is_left_out(item: HostedItem) -> bool:
    """Return whether it contains nothing for the model."""
    return isinstance(item, _LEFT_OUT)


def has_output_item(item: HostedItem) -> bool:
    """Return whether the client sends its result in a separate item."""
    return isinstance(item, (ComputerCallItem, ShellCallItem, ApplyPatchCallItem, ProgramItem))


def is_output(item: HostedItem) -> bool:
    """Return whether it is only the result; the call came before."""
    return type_of(item).endswith("_output")


def call_of(item: HostedItem) -> tuple[str, str]:
    """Return the name and the arguments of the call."""
    name = type_of(item).removesuffix("_call")
    given = {field: getattr(item, field) for field in _SHOWN if getattr(item, field) is not None}
    arguments = given.get("arguments")
    if isinstance(item, McpCallItem) and item.name:
        return item.name, arguments if isinstance(arguments, str) else _text(arguments or {})
    action = given.get("action")
    return name, _text(action if isinstance(action, dict) and len(given) == 1 else given)


def result_of(item: HostedItem) -> str:
    """Return the result as text; images are left out."""
    results = [value for field in _RESULTS if (value := getattr(item, field)) is not None]
    if isinstance(item, ProgramOutputItem) and item.result is not None:
        results.append(item.result)
    if any(isinstance(value, dict) and value.get("type") == "computer_screenshot" for value in results):
        return "(a picture)"
    return "\n".join(value if isinstance(value, str) else _text(value) for value in results) or "(done)"


def type_of(item: msgspec.Struct) -> str:
    return str(item.__struct_config__.tag)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
