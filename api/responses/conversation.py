"""Translates a body of the Responses API to a chat request. Pure.

Reasoning, text and the following calls are one message of the assistant. Calls that another server ran become calls with their
results. Unsupported fields that would change the answer are rejected by name.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import msgspec

from api.custom_tools import INPUT
from api.responses import hosted
from api.responses.requests import (
    AdditionalToolsItem,
    AgentMessageItem,
    CompactionItem,
    CompactionTriggerItem,
    CustomCallItem,
    EncryptedText,
    FunctionCallItem,
    InputImage,
    InputItem,
    InputText,
    InputTokensRequest,
    ItemReference,
    JsonObjectFormat,
    JsonSchemaFormat,
    LocalShellCallItem,
    LocalShellOutputItem,
    MessageItem,
    Output,
    PastRefusal,
    PastText,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from api.responses.seal import unseal
from api.responses.tool_set import LOCAL_SHELL, TOOL_SEARCH, ToolSet
from api.responses.tools import CustomTool, NamespaceTool, ResponseFunction, Tool
from api.translation import Translation

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_COMPACT = (
    "Write a summary of this conversation from which another assistant, who cannot see it, can go on: what the user wants, "
    "what was decided and done, what files and facts matter, and what is to be done next. Answer with the summary alone, and "
    "call no tool."
)
_SUMMARY = "Summary of the conversation so far:"
_PASSED = ("model", "stream", "temperature", "top_p")
_LARGEST_EFFORT = {"max": "xhigh"}

Part = dict[str, Any]


class ResponseTranslation(Translation, kw_only=True):
    tools: ToolSet
    compacts: bool  # the answer must be a summary
    dropped: list[str]  # not in the prompt: types of tools and items


def translate(
    body: InputTokensRequest,
    items: list[InputItem],
    num_past: int,
    compacts: bool = False,
    kept: Container[int] | None = None,
) -> ResponseTranslation:
    """Return the chat request. `items`: of the conversation; the first `num_past` are those of an earlier response. `kept`:
    indexes of items in the prompt, None: all. Raises RequestError with the client's name of the field."""
    loaded = [tool for item in items if isinstance(item, (ToolSearchOutputItem, AdditionalToolsItem)) for tool in item.tools]
    tools = ToolSet(body.tools or (), loaded)
    turns = _Turns(tools)
    if body.instructions:
        turns.add("system", [_text(body.instructions)], "instructions")
    for index, item in enumerate(items):
        if kept is not None and index not in kept:
            continue
        turns.take(item, f"input[{index - num_past}]" if index >= num_past else "previous_response_id")
    if compacts or turns.compacts:
        turns.add("user", [_text(_COMPACT)], "input")
    fields: dict[str, Any] = {"messages": turns.messages}
    if functions := tools.functions:
        fields["tools"] = functions
    if compacts or turns.compacts:
        fields["parse_tool_calls"] = False
    elif body.tool_choice is not None:
        fields["tool_choice"] = tools.choice(body.tool_choice)
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.reasoning is not None and body.reasoning.effort:
        fields["reasoning_effort"] = _LARGEST_EFFORT.get(body.reasoning.effort, body.reasoning.effort)
    if body.text is not None and body.text.format is not None and not (compacts or turns.compacts):
        fields["response_format"] = _format(body.text.format)
    if body.text is not None and body.text.verbosity in ("low", "high"):
        fields["chat_template_kwargs"] = {"verbosity": body.text.verbosity}
    if isinstance(body, ResponsesRequest):
        fields |= {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
        if body.max_output_tokens is not None:
            fields["max_tokens"] = body.max_output_tokens
        if has_logprobs(body):
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.model is not None:
        fields["model"] = body.model
    return ResponseTranslation(
        fields,
        turns.places,
        _NAMES,
        tools=tools,
        compacts=compacts or turns.compacts,
        dropped=list(dict.fromkeys([*tools.dropped, *turns.dropped])),
    )


def has_logprobs(body: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)


class _Turns:
    """The messages of the chat, and the place of each in the body."""

    def __init__(self, tools: ToolSet) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.compacts = False  # the client wants a summary
        self.dropped: list[str] = []
        self._tools = tools

    def take(self, item: InputItem, place: str) -> None:
        if isinstance(item, MessageItem):
            self._take_message(item, place)
        elif isinstance(item, ReasoningItem):
            reasoning = _reasoning(item)
            if reasoning:
                self._assistant(place, is_new=True)["reasoning_content"] = reasoning
        elif isinstance(item, FunctionCallItem):
            self._call(item.call_id, self._tools.name_of(item.name, item.namespace), item.arguments, place)
        elif isinstance(item, CustomCallItem):
            self._call(item.call_id, self._tools.name_of(item.name, item.namespace), {INPUT: item.input}, place)
        elif isinstance(item, CompactionItem):
            self._take_summary(item, place)
        elif isinstance(item, CompactionTriggerItem):
            self.compacts = True
        elif isinstance(item, AgentMessageItem):
            said = f"Message from {item.author}:\n" if item.author else "Message:\n"
            self.add("user", [_text(said), *_parts(item.content)], place)
        elif isinstance(item, ItemReference):
            self.dropped.append("item_reference")
        elif not isinstance(item, AdditionalToolsItem):
            self._take_tool_item(item, place)

    def _take_tool_item(self, item: Any, place: str) -> None:
        if isinstance(item, LocalShellCallItem):
            self._call(item.call_id or item.id or LOCAL_SHELL, LOCAL_SHELL, msgspec.to_builtins(item.action), place)
        elif isinstance(item, LocalShellOutputItem):
            self.add("tool", [_text(item.output)], place, tool_call_id=item.call_id or item.id or LOCAL_SHELL)
        elif isinstance(item, ToolSearchCallItem):
            self._call(item.call_id or TOOL_SEARCH, TOOL_SEARCH, _arguments(item.arguments), place)
        elif isinstance(item, ToolSearchOutputItem):
            names = ", ".join(self._names_in(item.tools)) or "none"
            self.add("tool", [_text(f"Tools found: {names}")], place, tool_call_id=item.call_id or TOOL_SEARCH)
        elif isinstance(item, hosted.HostedItem):
            self._take_hosted(item, place)
        else:
            self.add("tool", _parts(item.output) or [_text("")], place, tool_call_id=item.call_id)

    def _take_hosted(self, item: hosted.HostedItem, place: str) -> None:
        if hosted.is_left_out(item):
            self.dropped.append(hosted.type_of(item))
            return
        call_id = item.call_id or item.id or hosted.type_of(item)
        if not hosted.is_output(item):
            self._call(call_id, *hosted.call_of(item), place)
            if item.call_id is not None and hosted.has_output_item(item):
                return
        self.add("tool", [_text(hosted.result_of(item))], place, tool_call_id=call_id)

    def _take_summary(self, item: CompactionItem, place: str) -> None:
        try:
            self.add("user", [_text(f"{_SUMMARY}\n{unseal(item.encrypted_content or '')}")], place)
        except ValueError:
            self.dropped.append("compaction")

    def _call(self, call_id: str, name: str, arguments: Any, place: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(place).setdefault("tool_calls", []).append(call)

    def _names_in(self, tools: list[Tool], namespace: str | None = None) -> Iterator[str]:
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                yield from self._names_in([*tool.tools], tool.name)
            elif isinstance(tool, (ResponseFunction, CustomTool)):
                yield self._tools.name_of(tool.name, namespace)

    def add(self, role: str, parts: list[Part], place: str, **fields: Any) -> None:
        if role == "system" and self.messages and self.messages[-1]["role"] == "system":
            parts = [*_parted(self.messages.pop()["content"]), *parts]
            place = self.places.pop()
        self.messages.append({"role": role, "content": _content(parts), **fields})
        self.places.append(place)

    def _take_message(self, item: MessageItem, place: str) -> None:
        if item.role != "assistant":
            self.add("system" if item.role == "developer" else item.role, _parts(item.content) or [_text("")], place)
            return
        is_new = bool(self._assistant(place).get("content") or self._assistant(place).get("tool_calls"))
        self._assistant(place, is_new)["content"] = _content(_parts(item.content))

    def _assistant(self, place: str, is_new: bool = False) -> dict[str, Any]:
        """Return the assistant's message in progress."""
        if is_new or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self.places.append(place)
        return self.messages[-1]


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _content(parts: list[Part]) -> str | list[Part]:
    """Return the content; a single text as a string."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _parted(content: str | list[Part]) -> list[Part]:
    return [_text(content)] if isinstance(content, str) else content


def _arguments(arguments: Any) -> Any:
    """Return the arguments of a call: an object, or its JSON text."""
    return arguments if isinstance(arguments, (str, dict)) else {}


def _parts(content: Output | list[InputText | InputImage | PastText | PastRefusal | EncryptedText]) -> list[Part]:
    if isinstance(content, str):
        return [_text(content)]
    return [_part(part) for part in content if not isinstance(part, EncryptedText)]


def _part(part: InputText | InputImage | PastText | PastRefusal) -> Part:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return _text(part.refusal if isinstance(part, PastRefusal) else part.text)


def _reasoning(item: ReasoningItem) -> str:
    """Return the text of the reasoning; if it is another server's, the summary."""
    if item.content:
        return "\n".join(part.text for part in item.content)
    try:
        return unseal(item.encrypted_content or "")
    except ValueError:
        return "\n".join(part.text for part in item.summary or ())


def _format(given: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> dict[str, Any]:
    if isinstance(given, JsonObjectFormat):
        return {"type": "json_object"}
    if isinstance(given, TextFormat):
        return {"type": "text"}
    json_schema = {"name": given.name, "schema": given.schema, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in json_schema.items() if value is not None}}
