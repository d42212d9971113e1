"""Translates a body of Anthropic's API to a chat request. Pure.

Blocks become their counterparts in chat: thinking is `reasoning_content`, tool_use a tool call, tool_result a message of the
role tool. A final message of the assistant is continued. Unsupported fields that would change the answer are rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from api.anthropic.requests import (
    AssistantTurn,
    BlocksSource,
    BrowserStateBlock,
    CompactionBlock,
    ContextManagement,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    PlainTextSource,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerToolResult,
    ServerToolUseBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    UserBlock,
    UserTurn,
)
from api.model import ServedModel
from api.schemas.requests import invalid, shown
from api.translation import Translation

BILLING_HEADER = "x-anthropic-billing-header:"  # a client's note to its own server, different in every request
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_PASSED = ("model", "stream", "temperature", "top_k", "top_p")
_LARGEST_EFFORT = {"max": "xhigh"}

_SUMMARY = "Summary of the conversation so far:"
_SEALED = ("type", "encrypted_content", "encrypted_index")

Part = dict[str, Any]


def translate(body: CountTokensRequest, model: ServedModel) -> Translation:
    """Translate the request. Raises RequestError with the client's name of the field."""
    _check_context(body.context_management)
    turns = _Turns()
    turns.add_system(body.system)
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        if isinstance(message, UserTurn):
            turns.add_user(message.content, place)
        elif isinstance(message, AssistantTurn):
            turns.add_assistant(message.content, place)
        else:
            turns.add("system", _text_parts(message.content) or [_text("")], place)
    fields: dict[str, Any] = {"messages": turns.messages}
    if turns.messages and turns.messages[-1]["role"] == "assistant":
        if "tool_calls" in turns.messages[-1]:
            raise invalid(turns.places[-1], "a tool_use has no tool_result; send the tool_result in another message")
        fields["continue_final_message"] = True
    if body.tools:
        shown_tools = [
            _tool(tool, f"tools[{index}]")
            for index, tool in enumerate(body.tools)
            if not tool.defer_loading or tool.name in turns.referred
        ]
        if shown_tools:
            fields["tools"] = shown_tools
        _check_choice(body, {tool["function"]["name"] for tool in shown_tools})
    fields |= _choice(body) | _thinking(body, model) | _format(body)
    if isinstance(body, MessagesRequest):
        fields |= {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
        fields["max_tokens"] = body.max_tokens
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
    elif body.model is not None:
        fields["model"] = body.model
    return Translation(fields, turns.places, _NAMES)


class _Turns:
    """The messages of the chat, and the place of each in the body."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.referred: set[str] = set()  # tools found by a search

    def add(self, role: str, parts: list[Part], place: str, **fields: Any) -> None:
        is_plain = len(parts) == 1 and parts[0]["type"] == "text"
        content = parts[0]["text"] if is_plain else parts
        self.messages.append({"role": role, "content": content, **fields})
        self.places.append(place)

    def add_system(self, system: str | list[TextBlock] | None) -> None:
        parts = [part for part in _text_parts(system or []) if not part["text"].startswith(BILLING_HEADER)]
        if isinstance(system, str) and not parts:  # the header may be its first line
            parts = _text_parts(system.partition("\n")[2])
        if parts:
            self.add("system", parts, "system")

    def add_user(self, content: str | list[UserBlock], place: str) -> None:
        """Add a user's message. Tool results stay before or after the text, as they were sent."""
        if isinstance(content, str):
            self.add("user", _text_parts(content) or [_text("")], place)
            return
        said: list[UserBlock] = []
        for index, block in enumerate(content):
            if isinstance(block, ToolReferenceBlock):
                self.referred.add(block.tool_name)
            if isinstance(block, ToolResultBlock):
                if not isinstance(block.content, str):
                    self.referred |= {each.tool_name for each in block.content or () if isinstance(each, ToolReferenceBlock)}
                self._add_user_blocks(said, place)
                said = []
                at = f"{place}.content[{index}]"
                self.add("tool", _result_parts(block, at), at, tool_call_id=block.tool_use_id)
            else:
                said.append(block)
        self._add_user_blocks(said, place)

    def _add_user_blocks(self, blocks: list[UserBlock], place: str) -> None:
        if blocks:
            self.add("user", _parts(blocks, place), place)

    def add_assistant(self, content: str | list[Any], place: str) -> None:
        """Add an assistant's message. A result that another server put into it ends the message; the rest is another one."""
        blocks = [TextBlock(text=content)] if isinstance(content, str) else content
        pending: list[Any] = []
        for block in blocks:
            if isinstance(block, ServerToolResult):
                self._add_blocks(pending, place, is_only=False)
                pending = []
                self.referred |= _names_in(block.content)
                self.add("tool", [_text(_server_result(block.content))], place, tool_call_id=block.tool_use_id)
            else:
                pending.append(block)
        self._add_blocks(pending, place, is_only=len(pending) == len(blocks))

    def _add_blocks(self, blocks: list[Any], place: str, is_only: bool) -> None:
        """Add blocks as one message. `is_only`: the turn has no other blocks."""
        fields: dict[str, Any] = {}
        thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        if any(thinking):
            fields["reasoning_content"] = "\n".join(thinking)
        calls = [block for block in blocks if isinstance(block, (ToolUseBlock, ServerToolUseBlock))]
        if calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}} for call in calls
            ]
        texts = [block for block in blocks if isinstance(block, (TextBlock, CompactionBlock))]
        has_redacted = any(isinstance(block, RedactedThinkingBlock) for block in blocks)
        if (has_redacted or not is_only) and not (texts or fields):
            return  # nothing of it is for this model
        self.add("assistant", _parts(texts, place) or [_text("")], place, **fields)


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _text_parts(content: str | list[TextBlock]) -> list[Part]:
    if isinstance(content, str):
        return [_text(content)] if content else []
    return [_text(block.text) for block in content if block.text]


def _parts(blocks: Iterable[UserBlock | BrowserStateBlock | CompactionBlock], place: str) -> list[Part]:
    parts: list[Part] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            parts.append(_text(block.text))
        elif isinstance(block, ImageBlock):
            parts.append(_image(block))
        elif isinstance(block, DocumentBlock):
            parts += _document_parts(block, place)
        elif isinstance(block, ToolReferenceBlock):
            parts.append(_text(f"Tool found: {block.tool_name}"))
        elif isinstance(block, BrowserStateBlock):
            parts.append(_text(msgspec.json.encode(block).decode()))
        elif isinstance(block, CompactionBlock):
            parts += [_text(f"{_SUMMARY}\n{block.content}")] if block.content else []
        elif isinstance(block, SearchResultBlock):
            _check_citations(block, place)
            parts += [_text(f"{block.title}\n{block.source}"), *_text_parts(block.content)]
    return parts


def _image(block: ImageBlock) -> Part:
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document_parts(block: DocumentBlock, place: str) -> list[Part]:
    _check_citations(block, place)
    parts = [_text(text) for text in (block.title, block.context) if text]
    if isinstance(block.source, PlainTextSource):
        return [*parts, _text(block.source.data)]
    if not isinstance(block.source, BlocksSource):
        raise invalid(
            f"{place}.content",
            "PDFs and files are not supported; send their text in a source of type text, or send pages as images",
        )
    content: str | list[TextBlock | ImageBlock] = block.source.content
    return [*parts, *([_text(content)] if isinstance(content, str) else _parts(content, place))]


def _result_parts(block: ToolResultBlock, place: str) -> list[Part]:
    content = block.content
    parts = _text_parts(content) if isinstance(content, str) else _parts(content or [], place)
    if block.is_error:
        parts = [_text("The tool failed:"), *parts]
    return parts or [_text("")]


def _tool(tool: Tool, place: str) -> Mapping[str, Any]:
    if tool.type not in (None, "custom"):
        raise invalid(f"{place}.type", f"tool {shown(tool.type)} is run by Anthropic, not by this server; remove it")
    if tool.input_schema is None:
        raise invalid(f"{place}.input_schema", "is required")
    schema = tool.input_schema | ({"examples": tool.input_examples} if tool.input_examples else {})
    given = {"name": tool.name, "description": tool.description, "parameters": schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _check_choice(body: CountTokensRequest, shown_names: set[str]) -> None:
    """Check the tool choice: a tool that no search has found cannot be chosen."""
    deferred = {tool.name for tool in body.tools or () if tool.name not in shown_names}
    if isinstance(body.tool_choice, ToolChoiceTool) and body.tool_choice.name in deferred:
        raise invalid(
            "tool_choice.name",
            (
                f"{shown(body.tool_choice.name)} has defer_loading, and no tool_reference names it yet; choose "
                "another tool, or send it without defer_loading"
            ),
        )
    if isinstance(body.tool_choice, ToolChoiceAny) and deferred and not shown_names:
        raise invalid("tool_choice", "requires a call, but all tools have defer_loading; send one without it")


def _choice(body: CountTokensRequest) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, ToolChoiceNone):
        return {"tool_choice": "none"}
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if isinstance(choice, ToolChoiceTool):
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": "required" if isinstance(choice, ToolChoiceAny) else "auto"}


def _thinking(body: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    """Return template variables for reasoning. Without a thinking field, the template decides; an effort alone is a degree, and
    does not turn reasoning on. A budget is a limit, which a model without reasoning always meets."""
    fields: dict[str, Any] = {}
    effort = body.output_config and body.output_config.effort
    if effort:
        fields["chat_template_kwargs"] = {"reasoning_effort": _LARGEST_EFFORT.get(effort, effort)}
    if body.thinking is not None:
        thinks = not isinstance(body.thinking, ThinkingDisabled)
        fields.setdefault("chat_template_kwargs", {}).update({"enable_thinking": thinks, "thinking": thinks})
    if isinstance(body.thinking, ThinkingEnabled) and model.reasoning_parser != "none":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    return fields


def _format(body: CountTokensRequest) -> dict[str, Any]:
    output_format = (body.output_config and body.output_config.format) or body.output_format
    if not output_format:
        return {}
    json_schema = {"name": "answer", "schema": output_format.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def _check_context(management: ContextManagement | None) -> None:
    """Check the context edits. Known edits are accepted without effect: the conversation is the client's, within the model's
    context."""
    for index, edit in enumerate(management.edits if management else ()):
        if not edit.type.startswith(("clear_thinking_", "clear_tool_uses_")):
            place = f"context_management.edits[{index}]"
            raise invalid(place, f"{shown(edit.type)} is not supported, this server does not edit conversations; remove it")


def _server_result(content: Any) -> str:
    """Return a result of another server's tool as text, without data that only that server can read."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, map(_server_result, content)))
    if not isinstance(content, dict):
        return "" if content is None else str(content)
    kept = {name: value for name, value in content.items() if name not in _SEALED and value is not None}
    return msgspec.json.encode(kept).decode() if kept else ""


def _names_in(content: Any) -> set[str]:
    """Return the names of referenced tools, at any depth."""
    if isinstance(content, list):
        return set().union(*map(_names_in, content))
    if not isinstance(content, dict):
        return set()
    name = content.get("tool_name") if content.get("type") == "tool_reference" else None
    return ({name} if isinstance(name, str) else set()).union(*map(_names_in, content.values()))


def _check_citations(block: DocumentBlock | SearchResultBlock, place: str) -> None:
    if block.citations is not None and block.citations.enabled:
        raise invalid(f"{place}.content", "citations are not supported; disable them")
