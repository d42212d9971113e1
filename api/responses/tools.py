"""Tools in requests of the Responses API. Those that only OpenAI's servers can run are accepted and left out of the prompt
(`tool_set.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

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
    """Tools with a common prefix; calls name it."""

    name: FunctionName
    description: str | None = None
    tools: list[ResponseFunction | CustomTool] = []


class ToolSearch(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search"):
    """Finds tools with `defer_loading`. Without `execution: client` there is no search, and all tools are in the prompt."""

    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: JsonObject | None = None


class LocalShell(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell"):
    """Run commands on the client."""


class HostedTool(msgspec.Struct, kw_only=True):
    """A tool that only OpenAI's servers run; left out of the prompt."""


HOSTED_TOOLS = {
    "WebSearch": "web_search",
    "WebSearch2025": "web_search_2025_08_26",
    "WebSearchPreview": "web_search_preview",
    "WebSearchPreview2025": "web_search_preview_2025_03_11",
    "FileSearch": "file_search",
    "CodeInterpreter": "code_interpreter",
    "ImageGeneration": "image_generation",
    "Mcp": "mcp",
    "Computer": "computer",
    "ComputerPreview": "computer_use_preview",
    "Shell": "shell",
    "ApplyPatch": "apply_patch",
}


def _hosted_tool(name: str, tag: str) -> type[msgspec.Struct]:
    fields: list[Any] = [("server_label", str | None, None)] if tag == "mcp" else []
    doc = "Not run here, like all tools below: left out of the prompt." if tag == "web_search" else None
    return msgspec.defstruct(
        name, fields, bases=(HostedTool,), module=__name__, namespace={"__doc__": doc}, kw_only=True, tag_field="type", tag=tag
    )


if TYPE_CHECKING:
    AnyHostedTool = HostedTool
else:
    AnyHostedTool = Union[tuple(_hosted_tool(name, tag) for name, tag in HOSTED_TOOLS.items())]  # noqa: UP007
Tool = ResponseFunction | CustomTool | NamespaceTool | ToolSearch | LocalShell | AnyHostedTool


class ChosenFunctionTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    name: FunctionName
    namespace: FunctionName | None = None


class ChosenCustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: FunctionName
    namespace: FunctionName | None = None


class ChosenNamespace(msgspec.Struct, kw_only=True, tag_field="type", tag="namespace"):
    """All tools of a namespace."""

    name: FunctionName


ChosenTool = ChosenFunctionTool | ChosenCustomTool | ToolSearch | LocalShell | AnyHostedTool


class ChosenTools(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool | ChosenNamespace], Meta(min_length=1)]
