"""A body of the Responses API as a chat request. Pure.

Reasoning, what was said and the calls that follow are one message of the assistant. A custom tool is a function of one text.
What changes an answer and cannot be done is refused by name.
"""

from __future__ import annotations

import re
from typing import Any

from api.responses.items import INPUT, unseal
from api.responses.requests import (
    ChosenCustomTool,
    ChosenFunctionTool,
    CustomCallItem,
    CustomTool,
    FunctionCallItem,
    GrammarFormat,
    InputImage,
    InputItem,
    InputText,
    InputTokensRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    Output,
    PastRefusal,
    PastText,
    ReasoningItem,
    ResponseFunction,
    ResponsesRequest,
    TextFormat,
)
from api.schemas.requests import invalid
from api.translation import Translation

LARK = "x-lark"  # of a parameter: the grammar of its text (`engine/parsers/text_grammar.py`)
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_PASSED = ("model", "stream", "temperature", "top_p")
_LARGEST_EFFORT = {"max": "xhigh"}

Part = dict[str, Any]


def translate(body: InputTokensRequest, items: list[InputItem], num_past: int) -> Translation:
    """`items`: of the conversation, the first `num_past` of them those of an earlier response. RequestError names the field as
    its client knows it."""
    if isinstance(body, ResponsesRequest) and body.background:
        raise invalid("background", "this server answers while its client waits; leave it out, or stream")
    turns = _Turns()
    if body.instructions:
        turns.add("system", [_text(body.instructions)], "instructions")
    for index, item in enumerate(items):
        turns.take(item, f"input[{index - num_past}]" if index >= num_past else "previous_response_id")
    fields: dict[str, Any] = {"messages": turns.messages}
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.reasoning is not None and body.reasoning.effort:
        fields["reasoning_effort"] = _LARGEST_EFFORT.get(body.reasoning.effort, body.reasoning.effort)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    if isinstance(body, ResponsesRequest):
        fields |= {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
        if body.max_output_tokens is not None:
            fields["max_tokens"] = body.max_output_tokens
        if has_logprobs(body):
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.model is not None:
        fields["model"] = body.model
    return Translation(fields, turns.places, _NAMES)


def has_logprobs(body: ResponsesRequest) -> bool:
    return "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)


class _Turns:
    """The messages of the chat, and where each comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def take(self, item: InputItem, place: str) -> None:
        if isinstance(item, MessageItem):
            self._take_message(item, place)
        elif isinstance(item, ReasoningItem):
            reasoning = _reasoning(item, place)
            if reasoning:
                self._assistant(place, is_new=True)["reasoning_content"] = reasoning
        elif isinstance(item, (FunctionCallItem, CustomCallItem)):
            arguments = {INPUT: item.input} if isinstance(item, CustomCallItem) else item.arguments
            call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}
            self._assistant(place).setdefault("tool_calls", []).append(call)
        else:
            self.add("tool", _parts(item.output), place, tool_call_id=item.call_id)

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
        """The assistant's message that is being put together."""
        if is_new or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self.places.append(place)
        return self.messages[-1]


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _content(parts: list[Part]) -> str | list[Part]:
    """A text alone as such."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _parted(content: str | list[Part]) -> list[Part]:
    return [_text(content)] if isinstance(content, str) else content


def _parts(content: Output | list[InputText | InputImage | PastText | PastRefusal]) -> list[Part]:
    if isinstance(content, str):
        return [_text(content)]
    return [_part(part) for part in content]


def _part(part: InputText | InputImage | PastText | PastRefusal) -> Part:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return _text(part.refusal if isinstance(part, PastRefusal) else part.text)


def _reasoning(item: ReasoningItem, place: str) -> str:
    if item.content or not item.encrypted_content:
        return "\n".join(part.text for part in item.content or item.summary or ())
    try:
        return unseal(item.encrypted_content)
    except ValueError:
        raise invalid(f"{place}.encrypted_content", "it is no thinking of this server's; leave the item out") from None


def _tool(tool: ResponseFunction | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return {"type": "function", "function": _custom_function(tool)}
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _custom_function(tool: CustomTool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if isinstance(tool.format, GrammarFormat):
        is_regex = tool.format.syntax == "regex"
        schema[LARK] = _regex_grammar(tool.format.definition) if is_regex else tool.format.definition
        function["strict"] = True
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return function | {"parameters": parameters}


def _regex_grammar(regex: str) -> str:
    regex = re.sub(r"(?<!\\)\$$", "", regex.removeprefix("^"))  # it takes the whole text in any case
    body = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", regex).replace("\n", "\\n").replace("\r", "\\r")
    return f"start: /{body}/"


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, (ChosenFunctionTool, ChosenCustomTool)):
        return _chosen(choice)
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": choice.mode, "tools": [_chosen(tool) for tool in choice.tools]},
    }


def _chosen(tool: ChosenFunctionTool | ChosenCustomTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _format(given: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> dict[str, Any]:
    if isinstance(given, JsonObjectFormat):
        return {"type": "json_object"}
    if isinstance(given, TextFormat):
        return {"type": "text"}
    json_schema = {"name": given.name, "schema": given.schema, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in json_schema.items() if value is not None}}
