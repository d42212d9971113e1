"""Tools of the Responses API as its clients send them. Those that only OpenAI's servers can run are taken and left out of the
prompt (`tool_set.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api.schemas.requests import FunctionName

JsonObject = dict[str, Any]


class ResponseFunction(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[JsonObject | None, Meta(description="JSON schema of type object.")] = None
    strict: Annotated[bool | None, Meta(description="Calls follow `parameters` exactly.")] = None
    defer_loading: Annotated[bool | None, Meta(description="Added to the prompt only after a tool search finds it.")] = None


class FreeText(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    pass


class GrammarFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class CustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: FunctionName
    description: str | None = None
    format: FreeText | GrammarFormat | None = None
    defer_loading: bool | None = None


class NamespaceTool(msgspec.Struct, kw_only=True, tag_field="type", tag="namespace"):
    """Tools with a common name before theirs; calls of them say which."""

    name: FunctionName
    description: str | None = None
    tools: list[ResponseFunction | CustomTool] = []


class ToolSearch(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search"):
    """Finds tools with `defer_loading`. Without `execution: client` there is no search, and all tools are in the prompt."""

    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: JsonObject | None = None


class LocalShell(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell"):
    """Commands that the client runs."""


class WebSearch(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search"):
    """Not run here, like all tools below: left out of the prompt."""


class WebSearch2025(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search_2025_08_26"):
    pass


class WebSearchPreview(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search_preview"):
    pass


class WebSearchPreview2025(msgspec.Struct, kw_only=True, tag_field="type", tag="web_search_preview_2025_03_11"):
    pass


class FileSearch(msgspec.Struct, kw_only=True, tag_field="type", tag="file_search"):
    pass


class CodeInterpreter(msgspec.Struct, kw_only=True, tag_field="type", tag="code_interpreter"):
    pass


class ImageGeneration(msgspec.Struct, kw_only=True, tag_field="type", tag="image_generation"):
    pass


class Mcp(msgspec.Struct, kw_only=True, tag_field="type", tag="mcp"):
    server_label: str | None = None


class Computer(msgspec.Struct, kw_only=True, tag_field="type", tag="computer"):
    pass


class ComputerPreview(msgspec.Struct, kw_only=True, tag_field="type", tag="computer_use_preview"):
    pass


class Shell(msgspec.Struct, kw_only=True, tag_field="type", tag="shell"):
    pass


class ApplyPatch(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch"):
    pass


HostedTool = (
    WebSearch
    | WebSearch2025
    | WebSearchPreview
    | WebSearchPreview2025
    | FileSearch
    | CodeInterpreter
    | ImageGeneration
    | Mcp
    | Computer
    | ComputerPreview
    | Shell
    | ApplyPatch
)
Tool = ResponseFunction | CustomTool | NamespaceTool | ToolSearch | LocalShell | HostedTool


class ChosenFunctionTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    name: FunctionName
    namespace: FunctionName | None = None


class ChosenCustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: FunctionName
    namespace: FunctionName | None = None


class ChosenNamespace(msgspec.Struct, kw_only=True, tag_field="type", tag="namespace"):
    """All of its tools."""

    name: FunctionName


ChosenTool = ChosenFunctionTool | ChosenCustomTool | ToolSearch | LocalShell | HostedTool


class ChosenTools(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool | ChosenNamespace], Meta(min_length=1)]
