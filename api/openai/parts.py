"""The parts of an answer in OpenAI's chat format: chunks of a stream, and whole messages.

Used by `chat.py`. Both are built from the same parts, so that the chunks of a stream add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from api.client.generation import OpenSequence
from api.custom_tools import input_of
from api.schemas.responses import (
    AssistantMessage,
    CalledCustomTool,
    CalledFunction,
    ChatDelta,
    CustomDelta,
    FinishReason,
    FunctionDelta,
    MadeCall,
    MadeCustomCall,
    ToolCallDelta,
)
from engine.messages import Delta, Part


class DeltasOfParts:
    """The chunks of one choice's stream. The input of a custom tool is one chunk, because it is known only when its JSON is
    complete."""

    def __init__(self, has_reasoning: bool, custom_names: frozenset[str]) -> None:
        """`has_reasoning`: whether the client wants reasoning."""
        self._has_reasoning = has_reasoning
        self._custom_names = custom_names
        self._custom: tuple[int, list[str]] | None = None  # index and arguments of the open custom call

    def take(self, parts: Iterable[Part], is_last: bool) -> Iterator[ChatDelta]:
        """Yield a chunk for each part."""
        for part in parts:
            if part.kind == "arguments" and self._custom is not None:
                self._custom[1].append(part.text)
                continue
            yield from self._close()
            if part.kind == "content":
                yield ChatDelta(content=part.text)
            elif part.kind == "reasoning":
                if self._has_reasoning:
                    yield ChatDelta(reasoning_content=part.text, reasoning=part.text)
            elif part.kind == "call":
                call = ToolCallDelta(part.call_index, id=part.call_id, type="function")
                if part.text in self._custom_names:
                    self._custom = part.call_index, []
                    call.type, call.custom = "custom", CustomDelta(name=part.text, input="")
                else:
                    call.function = FunctionDelta(name=part.text, arguments="")
                yield ChatDelta(tool_calls=[call])
            else:
                yield ChatDelta(tool_calls=[ToolCallDelta(part.call_index, FunctionDelta(arguments=part.text))])
        if is_last:
            yield from self._close()

    def _close(self) -> Iterator[ChatDelta]:
        if self._custom is not None:
            index, texts = self._custom
            self._custom = None
            yield ChatDelta(tool_calls=[ToolCallDelta(index, custom=CustomDelta(input=input_of("".join(texts))))])


def message_of(
    delta: Delta, has_reasoning: bool, echoed: str = "", custom_names: frozenset[str] = frozenset()
) -> AssistantMessage:
    """Return a whole message, after the one that it continues."""
    text = echoed + delta.text
    if not delta.parts:
        return AssistantMessage(text)
    calls: list[MadeCall] = []
    reasoning: list[str] = []
    for part in delta.parts:
        if part.kind == "call":
            calls.append(MadeCall(part.call_id, CalledFunction(part.text, "")))
        elif part.kind == "arguments":
            calls[-1].function.arguments += part.text
        elif part.kind == "reasoning":
            reasoning.append(part.text)
    message = AssistantMessage(None if calls and not text else text)
    if reasoning and has_reasoning:
        message.reasoning = message.reasoning_content = "".join(reasoning)
    if calls:
        message.tool_calls = [_custom(call) if call.function.name in custom_names else call for call in calls]
    return message


def _custom(call: MadeCall) -> MadeCustomCall:
    return MadeCustomCall(call.id, CalledCustomTool(call.function.name, input_of(call.function.arguments)))


def finish_reason_of(sequence: OpenSequence, delta: Delta) -> FinishReason | None:
    if delta.finish_reason == "stop" and sequence.num_calls:
        return "tool_calls"
    return delta.finish_reason or None  # type: ignore[return-value]
