"""Turns an answer's parts into items and events; a stream has the same items, with the same ids, as the whole response.

Used by `response.py` in the api process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET

from api.custom_tools import input_of
from api.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputCompaction,
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputLocalShellCall,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputToolSearchCall,
    PartAdded,
    PartDone,
    Reasoning,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
    ShellExec,
)
from api.responses.seal import seal
from api.responses.tool_set import CalledTool, ToolSet
from engine.messages import Part

_PREFIXES = {
    "content": "msg",
    "reasoning": "rs",
    "function": "fc",
    "custom": "ctc",
    "tool_search": "tsc",
    "local_shell": "lsh",
    "compaction": "cmp",
}


class Items:
    """Output items of one response. An item is open until another begins, or the response ends."""

    def __init__(self, response_id: str, tools: ToolSet, seals_reasoning: bool, compacts: bool = False) -> None:
        """`seals_reasoning`: whether items of reasoning have content for later requests. `compacts`: the content is a
        summary."""
        self.items: list[OutputItem] = []  # closed items
        self._response_id = response_id
        self._tools = tools
        self._compacts = compacts
        self._seals_reasoning = seals_reasoning
        self._open: Part | None = None  # the first part of the open item
        self._tool = CalledTool("function", "")  # the called tool, if it is a call
        self._id = ""
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []
        self._new_logprobs: list[msgspec.Raw] = []  # of tokens that belong to no part yet
        self._num_placed = 0  # number of tokens before these

    def take(self, parts: Iterable[Part], logprobs: list[msgspec.Raw]) -> list[ResponseEvent]:
        """Return the events for new parts. `logprobs`: of the tokens of these parts, as JSON; those of content are kept."""
        events: list[ResponseEvent] = []
        self._new_logprobs += logprobs
        for part in parts:
            logprobs = self._logprobs_of(part)
            if self._compacts and part.kind != "content":
                continue
            if not self._belongs(part):
                events += self.close()
                events += self._begin(part)
            if part.kind == "call":
                continue
            self._texts.append(part.text)
            place: dict[str, Any] = {"output_index": len(self.items), "item_id": self._id}
            if self._compacts:
                continue
            if part.kind == "content":
                self._logprobs += logprobs
                events.append(OutputTextDelta(**place, delta=part.text, logprobs=logprobs))
            elif part.kind == "reasoning":
                events.append(ReasoningTextDelta(**place, delta=part.text))
            elif self._tool.kind == "function":  # the input of a custom tool is known when its JSON is complete
                events.append(ArgumentsDelta(**place, delta=part.text))
        return events

    def _logprobs_of(self, part: Part) -> list[msgspec.Raw]:
        """Return the log-probabilities of a part's tokens, without those of markers before it."""
        if not self._new_logprobs:
            return []
        num_new = len(self._new_logprobs)
        begin, end = (0, num_new) if part.end < 0 else (part.begin - self._num_placed, part.end - self._num_placed)
        logprobs = self._new_logprobs[begin:end]
        del self._new_logprobs[:end]
        self._num_placed += min(end, num_new)
        return logprobs

    def close(self, status: ItemStatus = "completed") -> list[ResponseEvent]:
        """Close the open item."""
        if self._open is None:
            return []
        text = "".join(self._texts)
        if self._is_custom:
            text = input_of(text)
        item = self._item(self._open, status, text)
        place: dict[str, Any] = {"output_index": len(self.items), "item_id": self._id}
        events: list[ResponseEvent] = []
        if isinstance(item, OutputMessage):
            events.append(OutputTextDone(**place, text=text, logprobs=self._logprobs))
            events.append(PartDone(**place, part=item.content[0]))
        elif isinstance(item, Reasoning):
            events.append(ReasoningTextDone(**place, text=text))
            events.append(PartDone(**place, part=item.content[0]))
        elif isinstance(item, OutputFunctionCall):
            events.append(ArgumentsDone(**place, name=item.name, arguments=text))
        elif isinstance(item, OutputCustomCall):
            events += [CustomInputDelta(**place, delta=text), CustomInputDone(**place, input=text)]
        events.append(ItemDone(output_index=len(self.items), item=item))
        self.items.append(item)
        self._open, self._texts, self._logprobs = None, [], []
        return events

    @property
    def _is_custom(self) -> bool:
        return self._open is not None and self._open.kind == "call" and self._tool.kind == "custom"

    def _belongs(self, part: Part) -> bool:
        """Return whether a part belongs to the open item."""
        if self._open is None or part.kind == "call":
            return False
        return part.kind == ("arguments" if self._open.kind == "call" else self._open.kind)

    def _begin(self, part: Part) -> list[ResponseEvent]:
        self._open = part
        if part.kind == "call":
            self._tool = self._tools.called(part.text)
        kind = "compaction" if self._compacts else self._tool.kind if part.kind == "call" else part.kind
        prefix = _PREFIXES[kind]
        self._id = f"{prefix}_{digest(f'{self._response_id}.{len(self.items)}')}"
        item = self._item(part, "in_progress", "")
        place: dict[str, Any] = {"output_index": len(self.items), "item_id": self._id}
        if not isinstance(item, (OutputMessage, Reasoning)):
            return [ItemAdded(output_index=len(self.items), item=item)]
        (content,) = item.content
        item.content = []
        return [ItemAdded(output_index=len(self.items), item=item), PartAdded(**place, part=content)]

    def _item(self, part: Part, status: ItemStatus, text: str) -> OutputItem:
        if self._compacts:
            return OutputCompaction(id=self._id, encrypted_content=seal(text) if status != "in_progress" else "")
        if part.kind == "content":
            return OutputMessage(id=self._id, status=status, content=[OutputText(text=text, logprobs=self._logprobs.copy())])
        if part.kind == "reasoning":
            sealed = seal(text) if self._seals_reasoning and status != "in_progress" else None
            return Reasoning(id=self._id, status=status, content=[ReasoningText(text=text)], encrypted_content=sealed)
        fields: dict[str, Any] = {"id": self._id, "status": status, "call_id": part.call_id}
        if self._tool.kind == "tool_search":
            return OutputToolSearchCall(**fields, arguments=_object(text))
        if self._tool.kind == "local_shell":
            return OutputLocalShellCall(**fields, action=_action(text))
        fields |= {"name": self._tool.name, "namespace": self._tool.namespace or UNSET}
        return OutputCustomCall(**fields, input=text) if self._is_custom else OutputFunctionCall(**fields, arguments=text)


def ids_of(response_id: str, index: int) -> set[str]:
    """Return the possible ids of an item, by its kind."""
    made = digest(f"{response_id}.{index}")
    return {f"{prefix}_{made}" for prefix in _PREFIXES.values()}


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _object(text: str) -> msgspec.Raw:
    """Return a call's arguments; an empty object if the model wrote none."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return msgspec.Raw(b"{}")
    return msgspec.Raw(text.encode())


def _action(text: str) -> ShellExec:
    """Return the command that a model wants to run; if it is not the expected JSON, all of its text."""
    try:
        return msgspec.json.decode(text, type=ShellExec)
    except msgspec.MsgspecError:
        return ShellExec(command=[text] if text else [])
