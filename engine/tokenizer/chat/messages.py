"""Checks the messages of a chat request and converts them to the format that chat templates expect.

Called by `template.py` in the tokenizer processes. Pure. Mistakes raise a RequestError that names the message.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from engine.errors import RequestError

Message = dict[str, Any]

MEDIA_TYPES = ("image", "video")  # types of the api process for parts with media, regardless of their original type
REASONING_FIELDS = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # as templates and clients call it; the first one given counts
_TEXT_TYPES = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type of part -> its field


class Arguments(dict[str, Any]):
    """Arguments of a call, with the text that the client sent. A template sees only the dictionary."""

    __slots__ = ("_text",)

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text


def arguments_text(arguments: Any) -> str:
    """Return arguments as text: the client's own if it sent text, otherwise JSON as templates write it."""
    if isinstance(arguments, str):
        return arguments
    return arguments._text if isinstance(arguments, Arguments) else json.dumps(arguments, ensure_ascii=False)


def read_messages(data: bytes) -> list[Message]:
    """Return the messages with every content as a string or a list of text parts (or None beside tool calls), and tool call
    arguments as objects."""
    messages = read_json(data, list[dict[str, Any]], "messages")
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one message", param="messages")
    return [_normalized(message, f"messages[{index}]") for index, message in enumerate(messages)]


def read_json(data: bytes, kind: Any, param: str) -> Any:
    """Decode `data` as JSON of the type `kind`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"{param} is invalid: {error}", param=param) from error


def with_media_as(messages: list[Message], forms: dict[str, Message]) -> list[Message]:
    """Return the messages with parts of images and video in the format that a template shows, by kind."""
    shown = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [forms.get(part["type"], part) for part in content]
        shown.append(message | {"content": content})
    return shown


def media_of(messages: list[Message]) -> list[str]:
    """Return the kinds of the images and videos, in order."""
    parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
    return [part["type"] for part in parts if part["type"] in MEDIA_TYPES]


def with_string_contents(messages: list[Message]) -> list[Message]:
    """Return the messages with text parts joined by line breaks, for templates that print the content as it is."""
    return [message | {"content": _joined(message["content"])} for message in messages]


def with_part_contents(messages: list[Message]) -> list[Message]:
    """Return the messages with strings as lists of one part, for templates that look only at parts."""
    return [message | {"content": _parted(message["content"])} for message in messages]


def _joined(content: str | list[Message] | None) -> str | None:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _parted(content: str | list[Message] | None) -> list[Message] | None:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _normalized(message: Message, where: str) -> Message:
    if not isinstance(message.get("role"), str):
        raise _mistake(f"{where}.role is missing or not a string")
    message = _with_tool_calls(message)
    normalized = message | {"content": _content(message.get("content"), where)}
    refusal = normalized.pop("refusal", None)
    if refusal and isinstance(refusal, str) and not normalized["content"]:
        normalized["content"] = refusal
    if message.get("tool_calls"):
        if message.get("content") is None:
            normalized["content"] = normalized["content"] or None
        normalized["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    else:
        normalized.pop("tool_calls", None)  # for a client an empty list means none, but not for a template
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if isinstance(reasoning, str):  # each template uses one of the names
        normalized |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return normalized


def _with_tool_calls(message: Message) -> Message:
    """Convert OpenAI's older format of a call and its result to the current one, which templates know."""
    if message["role"] == "function":
        return message | {"role": "tool", "tool_call_id": _function_id(message.get("name"))}
    call = message.get("function_call")
    if not isinstance(call, dict) or message.get("tool_calls"):
        return message
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return rest | {"tool_calls": [{"type": "function", "id": _function_id(call.get("name")), "function": call}]}


def _function_id(name: Any) -> str:
    return f"call_{name}"


def _content(content: Any, where: str) -> str | list[Message]:
    """Return the content; None becomes an empty string, because templates add it to strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _mistake(f"{where}.content is neither a string nor a list of parts")
    return [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _mistake(f'{where} is not a content part; a text part is {{"type": "text", "text": "..."}}')
    if kind in MEDIA_TYPES:
        return {"type": kind}
    if kind not in _TEXT_TYPES:
        raise _mistake(f"{where} has the type {kind!r}; this model takes text parts only")
    text = part.get(_TEXT_TYPES[kind])
    if not isinstance(text, str):
        raise _mistake(f"{where}.{_TEXT_TYPES[kind]} is missing or not a string")
    return {"type": "text", "text": text}


def _tool_calls(calls: Any, where: str) -> list[Message]:
    """Return calls with arguments as objects; clients send them as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _mistake(f"{where} is not a list of objects")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Message, where: str) -> Message:
    function = call.get("function")
    if not isinstance(function, dict):
        raise _mistake(f"{where}.function is missing or not an object")
    return call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Any:
    """Return the object that templates expect. Anything else stays text: it may be the model's own, cut by `max_tokens`."""
    if not arguments:
        return {}
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, RecursionError):
            return arguments
        return Arguments(decoded, arguments) if isinstance(decoded, dict) else arguments
    return arguments if isinstance(arguments, dict) else msgspec.json.encode(arguments).decode()


def _mistake(text: str) -> RequestError:
    return RequestError(text, param="messages")
