"""Rewrites a conversation for templates that would drop or reject a part of it.

Called by `showing.py`, which determines what a template needs. Pure: each function returns new messages and changes none.
Contents are as from `read_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from engine.tokenizer.chat.messages import REASONING_FIELDS, Message, arguments_text
from shm.blake2 import blake2b

WriteCalls = Callable[[list[Message]], str]
"""Text of a message's calls."""
SEPARATOR = "\n\n"  # between joined contents
SHORT_ID_CHARACTERS = 9  # of a call's id, for Mistral's templates
SYSTEM_ROLES = ("system", "developer")
_FILLER = " "  # neutral content; Ministral's template rejects an empty one


# ------------------------------------------------------------------------------------------------------------- roles


def with_developer_as_system(messages: list[Message]) -> list[Message]:
    """Rename OpenAI's newer system role to the older name, for templates that know only that."""
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def with_one_system(messages: list[Message]) -> list[Message]:
    """Join all system messages into one at the beginning."""
    systems, others = _split_systems(messages)
    return [_joined(systems), *others] if systems else messages


def with_system_in_first_user(messages: list[Message]) -> list[Message]:
    """Put system messages before the first user message's content, for templates without a system role."""
    systems, others = _split_systems(messages)
    return _in_front_of_user(systems, others, range(len(others))) if systems else messages


def with_system_in_last_user(messages: list[Message]) -> list[Message]:
    """Put system messages before the last user message's content, where Mistral's older templates show them."""
    systems, others = _split_systems(messages)
    return _in_front_of_user(systems, others, range(len(others) - 1, -1, -1)) if systems else messages


def with_alternating_roles(messages: list[Message]) -> list[Message]:
    """Make user and assistant alternate, for templates that reject anything else: equal neighbours are joined, a blank message
    fills a gap. Calls and results of tools do not count; the text of an assistant before them moves to its next text."""
    made: list[Message] = []
    last_place = -1  # of the last message that counts
    for message in messages:
        role = message["role"]
        if role not in ("user", "assistant") or message.get("tool_calls"):
            made.append(message)
            continue
        expected = "user" if last_place < 0 or made[last_place]["role"] == "assistant" else "assistant"
        if role == expected:
            made.append(message)
        elif last_place < 0:
            made += [{"role": "user", "content": _FILLER}, message]
        elif last_place == len(made) - 1 or role == "assistant":
            made.append(_joined([made.pop(last_place), message]))
        else:
            made += [{"role": "assistant", "content": _FILLER}, message]
        last_place = len(made) - 1
    return made


# ------------------------------------------------------------------------------------------------------------- calls


def with_calls_as(messages: list[Message], is_content_none: bool, are_texts: bool) -> list[Message]:
    """Give calls None instead of an empty content, or JSON text as arguments."""

    def change(message: Message) -> Message:
        content = None if is_content_none and not message["content"] else message["content"]
        calls = _with_arguments(message["tool_calls"], arguments_text) if are_texts else message["tool_calls"]
        return message | {"content": content, "tool_calls": calls}

    return _with_each_caller(messages, change)


def with_empty_contents(messages: list[Message]) -> list[Message]:
    """Give calls an empty content instead of None, for templates that would print it."""
    return [message | {"content": ""} if message["content"] is None else message for message in messages]


def with_argument_texts(messages: list[Message]) -> list[Message]:
    """Give calls the client's own text as arguments, so that a prompt has the tokens that the model wrote."""
    return with_calls_as(messages, is_content_none=False, are_texts=True)


def with_malformed_arguments_in_object(messages: list[Message]) -> list[Message]:
    """Wrap arguments that are not a JSON object into one, for templates that look into it."""

    def wrap(arguments: Any) -> Any:
        return {"arguments": arguments} if isinstance(arguments, str) else arguments

    return _with_each_caller(messages, lambda message: message | {"tool_calls": _with_arguments(message["tool_calls"], wrap)})


def with_single_calls(messages: list[Message]) -> list[Message]:
    """Put each call into its own message, followed by its result. A result belongs to the call with its id, else to the first
    call without a result."""
    made: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            made.append(message)
            continue
        end = place
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = messages[place:end]
        place = end
        for number, call in enumerate(calls):
            made.append(message | {"tool_calls": [call]} | ({} if number == 0 else {"content": ""}))
            result = _take_result(results, call, calls[number + 1 :])
            made += [result] if result else []
        made += results
    return made


def with_short_call_ids(messages: list[Message]) -> list[Message]:
    """Give calls ids of nine letters and digits; others become a digest of themselves, so that every turn has the same ones."""
    made = []
    for message in messages:
        if message.get("tool_calls"):
            message = message | {"tool_calls": [call | {"id": _short_id(call.get("id"))} for call in message["tool_calls"]]}
        if message["role"] == "tool":
            message = message | {"tool_call_id": _short_id(message.get("tool_call_id"))}
        made.append(message)
    return made


def with_text_before_calls(messages: list[Message]) -> list[Message]:
    """Put an assistant's text into its own message before its calls."""
    made = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            made.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {key: value for key, value in message.items() if key not in REASONING_FIELDS} | {"content": ""}
        made.append(message)
    return made


def as_json_lines(calls: list[Message]) -> str:
    """Write calls of a message as lines of JSON."""
    from engine.parsers.family import json_lines  # needed only for the rare template that shows no calls

    return json_lines([(call["function"].get("name"), call["function"]["arguments"]) for call in calls])


def with_calls_in_content(messages: list[Message], write: WriteCalls = as_json_lines) -> list[Message]:
    """Write calls in the assistant's content, for templates that show none."""
    made = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = {"role": message["role"], "content": write(calls)}
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            message = _joined([rest, text]) if message["content"] else rest | text
        made.append(message)
    return made


def with_results_as_user(messages: list[Message]) -> list[Message]:
    """Turn results of tools into user messages, for templates without a tool role."""
    return [{"role": "user", "content": message["content"]} if message["role"] == "tool" else message for message in messages]


def _with_each_caller(messages: list[Message], change: Callable[[Message], Message]) -> list[Message]:
    return [change(message) if message.get("tool_calls") else message for message in messages]


def _with_arguments(calls: Iterable[Message], change: Callable[[Any], Any]) -> list[Message]:
    return [call | {"function": call["function"] | {"arguments": change(call["function"]["arguments"])}} for call in calls]


def _take_result(results: list[Message], call: Message, later: list[Message]) -> Message | None:
    later_ids = {each.get("id") for each in later} - {None}
    for is_match in (
        lambda result: call.get("id") is not None and result.get("tool_call_id") == call.get("id"),
        lambda result: result.get("tool_call_id") not in later_ids,
    ):
        for place, result in enumerate(results):
            if is_match(result):
                return results.pop(place)
    return None


def _short_id(call_id: Any) -> str:
    text = call_id if isinstance(call_id, str) else ""
    if len(text) == SHORT_ID_CHARACTERS and text.isascii() and text.isalnum():
        return text
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:SHORT_ID_CHARACTERS]


# ---------------------------------------------------------------------------------------------------------- contents


def _split_systems(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    systems = [message for message in messages if message["role"] in SYSTEM_ROLES]
    return systems, [message for message in messages if message["role"] not in SYSTEM_ROLES]


def _in_front_of_user(systems: list[Message], others: list[Message], places: Iterable[int]) -> list[Message]:
    place = next((place for place in places if others[place]["role"] == "user"), None)
    if place is None:
        return [_joined(systems) | {"role": "user"}, *others]
    joined = _joined([*systems, others[place]]) | {"role": "user"}
    return [*others[:place], joined, *others[place + 1 :]]


def _joined(messages: list[Message]) -> Message:
    """Return one message with all their contents; the last one's other fields are used."""
    contents = [message["content"] for message in messages if message["content"]]
    made: Message = {}
    for message in messages:
        made |= message
    if all(isinstance(content, str) for content in contents):
        return made | {"content": SEPARATOR.join(contents)}
    return made | {"content": list(_parts(contents))}


def _parts(contents: list[str | list[Message]]) -> Iterator[Message]:
    for content in contents:
        yield from [{"type": "text", "text": content}] if isinstance(content, str) else content
