"""Which tools are in a prompt, under which names, and which of the client's tools a call means. Pure.

A tool of a namespace has its own name in the prompt, or NAMESPACE__NAME if another tool has the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from api.custom_tools import function_of
from api.responses.tools import (
    ChosenNamespace,
    ChosenTools,
    CustomTool,
    GrammarFormat,
    HostedTool,
    LocalShell,
    NamespaceTool,
    ResponseFunction,
    Tool,
    ToolSearch,
)
from api.schemas.requests import invalid, shown

TOOL_SEARCH, LOCAL_SHELL = "tool_search", "local_shell"
_SEARCH = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}

Kind = Literal["function", "custom", "tool_search", "local_shell"]


class CalledTool(msgspec.Struct, frozen=True):
    """Name and kind of a tool, as known to the client."""

    kind: Kind
    name: str
    namespace: str | None = None


class ToolSet:
    def __init__(self, tools: Iterable[Tool], loaded: Iterable[Tool] = ()) -> None:
        """`tools`: of the request. `loaded`: found by a search, in its items."""
        tools = list(tools)
        self.dropped: list[str] = []  # types of tools that are not run here
        self._searches = any(isinstance(tool, ToolSearch) and tool.execution == "client" for tool in tools)
        self._functions: dict[CalledTool, dict[str, Any]] = {}
        for tool in tools:
            self._add(tool)
        for tool in loaded:
            self._add(tool, is_loaded=True)
        num_named = Counter(tool.name for tool in self._functions)
        self._names = {
            tool: f"{tool.namespace}__{tool.name}" if tool.namespace and num_named[tool.name] > 1 else tool.name
            for tool in self._functions
        }
        self._called = {f"{tool.namespace}__{tool.name}": tool for tool in self._functions if tool.namespace}
        self._called |= {name: tool for tool, name in self._names.items()}

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Return the tools for a chat request."""
        return [
            {"type": "function", "function": function | {"name": self._names[tool]}}
            for tool, function in self._functions.items()
        ]

    def called(self, name: str) -> CalledTool:
        """Return the tool that a model calls by a name."""
        return self._called.get(name) or CalledTool("function", name)

    def name_of(self, name: str, namespace: str | None) -> str:
        """Return the name in the prompt of a client's tool."""
        for tool, in_prompt in self._names.items():
            if tool.name == name and (namespace is None or tool.namespace == namespace):
                return in_prompt
        return name

    def choice(self, choice: Any) -> Any:
        """Return a `tool_choice` for a chat request."""
        if choice is None or isinstance(choice, str):
            return choice
        if not isinstance(choice, ChosenTools):
            return self._function(self._chosen(choice, "tool_choice")[0])
        names = [name for tool in choice.tools for name in self._chosen(tool, "tool_choice.tools", may_drop=True)]
        if not names:
            raise invalid("tool_choice.tools", "this server runs none of these tools; allow a function")
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": [self._function(name) for name in dict.fromkeys(names)]},
        }

    def _chosen(self, choice: Any, param: str, may_drop: bool = False) -> list[str]:
        if isinstance(choice, ChosenNamespace):
            return [in_prompt for tool, in_prompt in self._names.items() if tool.namespace == choice.name]
        if isinstance(choice, (ToolSearch, LocalShell)):
            return [TOOL_SEARCH if isinstance(choice, ToolSearch) else LOCAL_SHELL]
        if isinstance(choice, HostedTool):
            if may_drop:
                return []
            raise invalid(param, f"this server does not run {shown(type_of(choice))}; choose a function, or auto")
        return [self.name_of(choice.name, choice.namespace)]

    def _function(self, name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    def _add(self, tool: Tool, namespace: str | None = None, is_loaded: bool = False) -> None:
        if isinstance(tool, NamespaceTool):
            for each in tool.tools:
                self._add(each, tool.name, is_loaded)
        elif isinstance(tool, (ResponseFunction, CustomTool)):
            if is_loaded or not (self._searches and tool.defer_loading):
                is_custom = isinstance(tool, CustomTool)
                called = CalledTool("custom" if is_custom else "function", tool.name, namespace)
                if called in self._functions and not is_loaded:
                    raise invalid("tools", f"two functions are named {shown(tool.name)}; names must be unique")
                self._functions[called] = _custom(tool) if isinstance(tool, CustomTool) else _function(tool)
        elif isinstance(tool, LocalShell):
            self._functions[CalledTool("local_shell", LOCAL_SHELL)] = {
                "description": "Run a command on the user's machine.",
                "parameters": _SHELL,
            }
        elif isinstance(tool, ToolSearch) and tool.execution == "client":
            self._functions[CalledTool("tool_search", TOOL_SEARCH)] = {
                "description": tool.description or "Find more tools.",
                "parameters": tool.parameters or _SEARCH,
            }
        else:
            server = getattr(tool, "server_label", None)
            label = f"mcp {server}" if server else type_of(tool)
            self.dropped.append(label)


def type_of(tool: msgspec.Struct) -> str:
    return str(tool.__struct_config__.tag)


def _function(tool: ResponseFunction) -> dict[str, Any]:
    given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {name: value for name, value in given.items() if value is not None}


def _custom(tool: CustomTool) -> dict[str, Any]:
    grammar = tool.format if isinstance(tool.format, GrammarFormat) else None
    syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, None)
    function = function_of(tool.name, tool.description, syntax, definition)
    del function["name"]
    return function
