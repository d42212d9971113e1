"""Determines which parts of a conversation a chat template shows, by rendering small marked ones, and which rewrites it needs.

Called by `template.py`. A part of a conversation that never reaches the prompt is worse than a slightly unusual prompt:
templates silently drop the `developer` role, a second system message, the second of two calls, or text beside a call. A
conversation with none of these is rendered as it is, without trials, and so is one that the template shows completely.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from engine.errors import RequestError
from engine.tokenizer.chat.messages import REASONING_FIELDS, Message
from engine.tokenizer.chat.rewrites import (
    SYSTEM_ROLES,
    WriteCalls,
    as_json_lines,
    with_alternating_roles,
    with_argument_texts,
    with_calls_as,
    with_calls_in_content,
    with_developer_as_system,
    with_empty_contents,
    with_malformed_arguments_in_object,
    with_one_system,
    with_results_as_user,
    with_short_call_ids,
    with_single_calls,
    with_system_in_first_user,
    with_system_in_last_user,
    with_text_before_calls,
)

Rewrite = Callable[[list[Message]], list[Message]]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MARK = "tokamakprobe"  # only letters: no template quotes or cuts them
_SHORT_IDS = ("tokamak00", "tokamak01")
_LONG_IDS = ("call_tokamak_0123456789abcdef", "call_tokamak_0123456789abcdff")
_ARGUMENTS = {"first": _MARK, "second": 2}
_ARGUMENTS_TEXT = json.dumps(_ARGUMENTS)
_MAX_SHAPES = 256  # of conversations, with the result of their trial
_CALL_FORMS = ((False, False), (True, False), (False, True), (True, True))  # what most templates take comes first
_DICTIONARY = f"{{'first': '{_MARK}"  # arguments in Python's notation, from a template that expects text
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {name: {"type": "string", "description": ""}}},
        },
    }
    for name in ("first", "second")
]


class Showing:
    """The rewrites that one template needs, each determined when a conversation first needs it.

    `attempt(messages, tools)` renders messages, or returns "" if the template rejects them; `source` is the template's text;
    `write_calls` writes calls as the model does, for a template that shows none.
    """

    def __init__(
        self, source: str, attempt: Callable[[list[Message], Any], str], write_calls: WriteCalls = as_json_lines
    ) -> None:
        self._source = source
        self._write_calls = write_calls
        self._attempt = attempt
        self._known_roles = set(_ROLES)
        self._is_shape_shown: dict[object, bool] = {}

    def rewrite(self, messages: list[Message]) -> list[Message]:
        """Return the messages rewritten so that the template shows all of them. Raises RequestError if it would drop a role."""
        if any(message["content"] is None for message in messages) and not self._takes_none:
            messages = with_empty_contents(messages)
        roles = [message["role"] for message in messages]
        self._check_roles(roles)
        has_calls = "tool" in roles or any(message.get("tool_calls") for message in messages)
        systems = [role for role in roles if role in SYSTEM_ROLES]
        is_late = len(systems) > (roles[0] in SYSTEM_ROLES)
        if "developer" in systems and not (self._knows_late_developer if is_late else self._knows_developer):
            messages = with_developer_as_system(messages)
        is_unusual = self._has_unusual_turns([message["role"] for message in messages], has_calls)
        if (is_unusual or systems) and self._shows_as_it_is(messages):
            return self._own_texts(messages) if has_calls else messages
        if has_calls:
            for change in self._call_rewrites:
                messages = change(messages)
        if systems:
            messages = self._place_system(messages, is_late)
        if self._has_unusual_turns([message["role"] for message in messages], has_calls) and self._wants_turns:
            messages = with_alternating_roles(messages)
        return messages

    def _shows_as_it_is(self, messages: list[Message]) -> bool:
        """Return whether a conversation of the same shape, with a mark in each part, appears completely."""
        shape = tuple(map(_shape_of, messages))
        if shape not in self._is_shape_shown:
            if len(self._is_shape_shown) >= _MAX_SHAPES:
                self._is_shape_shown.clear()
            marked, num_marks = _marked(messages)
            tools = _PROBE_TOOLS if any("tool_calls" in message for message in messages) else self._tools
            text = self._attempt(marked, tools)
            self._is_shape_shown[shape] = _DICTIONARY not in text and all(
                f"{_MARK}{number:04}" in text for number in range(num_marks)
            )
        return self._is_shape_shown[shape]

    # ------------------------------------------------------------------------------------------------------- roles

    def _check_roles(self, roles: list[str]) -> None:
        """Raise RequestError for a role that the template neither names nor shows: it would be silently dropped."""
        for index, role in enumerate(roles):
            if role in self._known_roles or role in self._source or not self._shows([_user(_MARK)], 1):
                continue
            marked = _message(role, _MARK)
            if not any(
                self._shows(messages, 1)
                for messages in ([_user("u"), _assistant("a"), marked, _user("v")], [marked, _user("u")], [_user("u"), marked])
            ):
                remedy = f"send one of {', '.join(_ROLES)}"
                raise RequestError(
                    f"messages[{index}].role: {role!r} is not supported by this model's chat template; {remedy}",
                    code="invalid_value",
                    param=f"messages[{index}].role",
                )
            self._known_roles.add(role)

    @cached_property
    def _tools(self) -> Any:
        """Tools for trial renders: none, except for templates that render nothing without tools."""
        return None if self._shows([_user(_MARK)], 1, None) else _PROBE_TOOLS

    @cached_property
    def _knows_developer(self) -> bool:
        return "developer" in self._source and self._shows([_message("developer", _MARK), _user("u")], 1)

    @cached_property
    def _knows_late_developer(self) -> bool:
        late = [
            _system(_MARK),
            _message("developer", _MARK),
            _user("u"),
            _assistant("a"),
            _message("developer", _MARK),
            _user("v"),
        ]
        return self._knows_developer and self._shows(late, 3)

    @cached_property
    def _shows_system(self) -> bool:
        return self._shows([_system(_MARK), _user("u")], 1) or not self._shows([_user(_MARK)], 1)

    @cached_property
    def _shows_late_systems(self) -> bool:
        two = self._shows([_system(_MARK), _system(_MARK), _user("u")], 2)
        return two and self._shows([_system(_MARK), _user("u"), _assistant("a"), _system(_MARK), _user("v")], 2)

    @cached_property
    def _shows_system_before_result(self) -> bool:
        call = _assistant("", _call("first", {}, _SHORT_IDS[0]))
        messages = [_system(_MARK), _user("u"), call, _result("r", _SHORT_IDS[0])]
        for change in self._call_rewrites:
            messages = change(messages)
        return self._shows(messages, 1)

    def _place_system(self, messages: list[Message], is_late: bool) -> list[Message]:
        if not self._shows_system:
            return with_system_in_first_user(messages)
        if is_late and not self._shows_late_systems:
            messages = with_one_system(messages)
        if messages[-1]["role"] == "tool" and not self._shows_system_before_result:
            messages = with_system_in_last_user(messages)
        return messages

    def _has_unusual_turns(self, roles: list[str], has_calls: bool) -> bool:
        turns = [role for role in roles if role in ("user", "assistant")]
        return has_calls or turns[:1] != ["user"] or any(a == b for a, b in pairwise(turns))

    @cached_property
    def _wants_turns(self) -> bool:
        """Whether it rejects two messages of one role in a row. A template that rejects every trial is left alone."""
        return self._shows([_user(_MARK)], 1) and not self._shows([_user(_MARK), _user(_MARK)], 2)

    # ------------------------------------------------------------------------------------------------------- calls

    @cached_property
    def _call_rewrites(self) -> tuple[Rewrite, ...]:
        """Return the rewrites for calls, in the order in which they apply."""
        if not self._shows([_user(_MARK)], 1):
            return ()  # nothing can be determined
        form = next((form for form in _CALL_FORMS if self._shows_turn(form)), None)
        if form is None:
            shows_results = self._shows([_user("u"), _assistant("a"), _result(_MARK, _SHORT_IDS[0])], 1)
            written = partial(with_calls_in_content, write=self._write_calls)
            return (written, *(() if shows_results else (with_results_as_user,)))
        changes: list[Rewrite] = []
        if not self._shows_turn(form, call_id=_LONG_IDS[0]):
            changes.append(with_short_call_ids)
        if not self._shows_turn(form, arguments=_MARK):
            changes.append(with_malformed_arguments_in_object)
        if not self._shows_two(form):
            changes.append(with_single_calls)
        if not self._shows_turn(form, said=_MARK):
            changes.append(with_text_before_calls)
        if form != _CALL_FORMS[0]:
            changes.append(lambda messages: with_calls_as(messages, *form))
        changes.append(self._own_texts)
        return tuple(changes)

    def _own_texts(self, messages: list[Message]) -> list[Message]:
        """Give calls the client's own text as arguments if the template writes it as it is."""
        return with_argument_texts(messages) if self._writes_texts else messages

    @cached_property
    def _takes_none(self) -> bool:
        """Whether calls with None as content look as without a content, and not as with a text."""

        def written(content: str | None) -> str:
            call = _assistant("", _call("first", {"first": _MARK}, _SHORT_IDS[0])) | {"content": content}
            return self._attempt([_user("u"), call, _result(_MARK, _SHORT_IDS[0]), _assistant("a"), _user("v")], _PROBE_TOOLS)

        with_none, with_empty = written(None), written("")
        return with_none.count(_MARK) >= max(with_empty.count(_MARK), 2) and len(with_none) <= len(with_empty)

    @cached_property
    def _writes_texts(self) -> bool:
        def written(arguments: Any) -> str:
            call = _assistant("", _call("first", arguments, _SHORT_IDS[0]))
            return self._attempt([_user("u"), call, _result("r", _SHORT_IDS[0]), _assistant("a"), _user("v")], _PROBE_TOOLS)

        return _ARGUMENTS_TEXT in written(_ARGUMENTS) == written(_ARGUMENTS_TEXT)

    def _shows_turn(self, form: tuple[bool, bool], call_id: str = _SHORT_IDS[0], arguments: Any = None, said: str = "") -> bool:
        """Return whether a call appears with its arguments, its result and the text beside it."""
        arguments = {"first": _MARK} if arguments is None else arguments
        call = _assistant(said, _call("first", arguments, call_id))
        messages = [_user("u"), call, _result(_MARK, call_id), _assistant("a"), _user("v")]
        return self._shows(with_calls_as(messages, *form), 3 if said else 2, _PROBE_TOOLS)

    def _shows_two(self, form: tuple[bool, bool]) -> bool:
        calls = [_call(tool["function"]["name"], {tool["function"]["name"]: _MARK}, call_id)  # type: ignore[index]
                 for tool, call_id in zip(_PROBE_TOOLS, _SHORT_IDS, strict=True)]  # fmt: skip
        results = [_result(_MARK, call_id) for call_id in _SHORT_IDS]
        messages = [_user("u"), _assistant("", *calls), *results, _assistant("a"), _user("v")]
        return self._shows(with_calls_as(messages, *form), 4, _PROBE_TOOLS)

    def _shows(self, messages: list[Message], num_marks: int, tools: Any = ...) -> bool:
        text = self._attempt(messages, self._tools if tools is ... else tools)
        return text.count(_MARK) >= num_marks and _DICTIONARY not in text


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _user(content: str) -> Message:
    return _message("user", content)


def _system(content: str) -> Message:
    return _message("system", content)


def _assistant(content: str, *calls: Message) -> Message:
    return _message("assistant", content) | ({"tool_calls": list(calls)} if calls else {})


def _call(name: str, arguments: Any, call_id: str) -> Message:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _result(content: str, call_id: str) -> Message:
    return _message("tool", content) | {"tool_call_id": call_id}


def _shape_of(message: Message) -> object:
    """Return what decides whether a template shows a message, regardless of its texts."""
    content = message["content"]
    parts = tuple(part["type"] for part in content) if isinstance(content, list) else (content is None, bool(content))
    calls = [(call.get("id"), isinstance(call["function"]["arguments"], str)) for call in message.get("tool_calls", ())]
    has_reasoning = any(message.get(name) for name in REASONING_FIELDS)
    return message["role"], parts, tuple(calls), has_reasoning, message.get("tool_call_id"), frozenset(message)


def _marked(messages: list[Message]) -> tuple[list[Message], int]:
    """Return the messages with a numbered mark as each text and each call's arguments, and the number of marks."""
    num_marks = 0

    def mark() -> str:
        nonlocal num_marks
        num_marks += 1
        return f"{_MARK}{num_marks - 1:04}"

    def marked(message: Message) -> Message:
        content = message["content"]
        if isinstance(content, list):
            made = message | {"content": [part | {"text": mark()} if "text" in part else part for part in content]}
        else:
            made = message | {"content": mark() if content else content}
        if "tool_calls" in message:
            made["tool_calls"] = [with_mark(call) for call in message["tool_calls"]]
        return made

    def with_mark(call: Message) -> Message:
        arguments = mark() if isinstance(call["function"]["arguments"], str) else {"first": mark()}
        return call | {"function": call["function"] | {"name": "first", "arguments": arguments}}

    return [marked(message) for message in messages], num_marks
