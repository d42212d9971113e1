"""Chat templates: turn a conversation into the prompt format that the model was trained on.

Used by the tokenizer's helper processes. `ChatTemplates` owns the model's templates and decides which of them, or of those sent
with requests, renders a conversation. `sandbox.py` enforces the limits.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import UndefinedError

from engine.errors import CheckpointError, RequestError
from engine.messages import ChatPrompt
from engine.tokenizer.chat.messages import (
    MEDIA_TYPES,
    Message,
    media_of,
    read_json,
    read_messages,
    with_media_as,
    with_part_contents,
    with_string_contents,
)
from engine.tokenizer.chat.rewrites import WriteCalls, as_json_lines
from engine.tokenizer.chat.sandbox import Template, TemplateBoundError, failure_text
from engine.tokenizer.chat.showing import Showing
from engine.tokenizer.chat.tools import takes_tools_in_system, with_all_fields, with_call_ids, with_tools_in_system

# transformers' marker for the end of the message to continue; some templates know it. The space shows whether they strip text.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PROBE = "tokamak-probe"
_MEDIA_FORMS: tuple[Callable[[str], Message], ...] = (  # in order of preference by templates
    lambda kind: {"type": kind},
    lambda kind: {"type": f"{kind}_url", f"{kind}_url": {"url": ""}},
    lambda kind: {"type": kind, kind: ""},
)
_THINKING_SWITCH = re.compile(r"\b(reasoning_effort|enable_thinking|thinking)\b(?!>)")
_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})
_TRIAL_VARIABLES: dict[str, Any] = {
    "bos_token": "",
    "eos_token": "",
    "add_generation_prompt": True,
    "tools": None,
    "documents": None,
    "strftime_now": datetime(2026, 1, 1).strftime,
    "functions": "",
    "datetime": "",
}


class ChatTemplate:
    """One template, and which contents it shows: strings, lists of parts, or both, and which media parts (determined by
    trial)."""

    def __init__(self, source: str, marks: Mapping[str, str] | None = None, write_calls: WriteCalls = as_json_lines) -> None:
        """`marks`: of the placeholders, by their names in the template (`Vocabulary.marks`). They replace the names in the
        template itself, before any text of a client is inserted."""
        for name, mark in (marks or {}).items():
            source = source.replace(name, mark)
        self._template = Template(source)
        self._takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        self._takes_strings = self._shows(_PROBE) or not self._takes_parts
        marks_shown = tuple((marks or {}).values())
        forms = {kind: self._form_of(kind, marks_shown) for kind in MEDIA_TYPES} if marks_shown and self._takes_parts else {}
        self._media_forms = {kind: form for kind, form in forms.items() if form}
        self._showing = Showing(source, self._attempt_conversation, write_calls)

    @property
    def source(self) -> str:
        return self._template.source

    @property
    def always_thinks(self) -> bool:
        """Whether it supports reasoning, but nothing that ends it."""
        return "</think>" in self.source and not _THINKING_SWITCH.search(self.source)

    def render(self, messages: list[Message], variables: dict[str, Any], max_characters: int) -> str:
        """Return the prompt text of `messages`, as from `read_messages`."""
        for kind in media_of(messages):
            if kind not in self._media_forms:
                raise RequestError(
                    (
                        f"the chat template does not support {kind} parts; send text, or start the server with another "
                        "--chat-template"
                    ),
                    code="unsupported_media",
                    param="messages",
                )
        messages = with_media_as(messages, self._media_forms)
        if variables.get("tools") and takes_tools_in_system(self.source):
            messages = with_tools_in_system(messages, variables["tools"])
        messages = self._showing.rewrite(self._with_contents(messages))
        try:
            return self._template.render({"messages": messages, **variables}, max_characters)
        except (UndefinedError, TypeError):
            complete = {
                "messages": with_call_ids(messages),
                **variables,
                "tools": with_all_fields(variables.get("tools") or []),
            }
            try:
                return self._template.render(complete, max_characters)
            except (UndefinedError, TypeError):
                pass
            raise

    def _with_contents(self, messages: list[Message]) -> list[Message]:
        """Return the messages with contents as strings or lists of parts, whichever the template shows."""
        if not self._takes_parts:
            return with_string_contents(messages)
        return messages if self._takes_strings else with_part_contents(messages)

    def _attempt_conversation(self, messages: list[Message], tools: Any) -> str:
        messages = messages if self._takes_strings else with_part_contents(messages)
        return self._attempt(messages, tools=copy.deepcopy(tools))  # the template may change it

    def _form_of(self, kind: str, marks: tuple[str, ...]) -> Message | None:
        """Return the format of a part for which the template writes one placeholder; None: it shows no such parts."""
        for form in _MEDIA_FORMS:
            text = self._trial([form(kind)])
            if sum(map(text.count, set(marks))) == 1:
                return form(kind)
        return None

    def _shows(self, content: Any) -> bool:
        """Return whether `content` appears as text, not in the notation of a list."""
        text = self._trial(content)
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _trial(self, content: Any) -> str:
        """Render a trial conversation with the given content."""
        return self._attempt([{"role": "user", "content": content}])

    def _attempt(self, messages: list[Message], **variables: Any) -> str:
        """Return the messages as text, or "" if the template rejects them."""
        try:
            return self._template.render({"messages": messages, **_TRIAL_VARIABLES, **variables}, max_characters=1 << 20)
        except (TemplateBoundError, MemoryError):
            raise
        except Exception:  # a template may raise anything
            return ""


class ChatTemplates:
    """The templates of a model by name ("default", and perhaps "tool_use"), and its special tokens as their variables."""

    def __init__(
        self,
        sources: dict[str, str],
        special_tokens: dict[str, str],
        max_characters: int,
        *,
        trusts_requests: bool,
        marks: Mapping[str, str] | None = None,
        write_calls: WriteCalls = as_json_lines,
    ) -> None:
        """`max_characters`: of a rendered prompt. `trusts_requests`: whether requests may bring their own templates. `marks`,
        `write_calls`: as in `ChatTemplate`. Raises CheckpointError if a template does not compile."""
        self._marks = marks or {}
        self._write_calls = write_calls
        self._templates = {name: _compiled(name, source, self._marks, write_calls) for name, source in sources.items()}
        self._special_tokens = {role: self._marks.get(token, token) for role, token in special_tokens.items()}
        self._max_characters = max_characters
        self._trusts_requests = trusts_requests

    def has(self, name: str) -> bool:
        """Return whether the model has a template of this name."""
        return name in self._templates

    @property
    def has_pairs(self) -> bool:
        """Whether the default template knows the roles of a query and a document, for models that score them."""
        source = self._templates["default"].source if self.has("default") else ""
        return all(f"'{role}'" in source or f'"{role}"' in source for role in ("query", "document"))

    def render(self, prompt: ChatPrompt, now: datetime) -> str:
        """Return the prompt text. `now` is the time that the template sees: the request's arrival, so that a retry renders the
        same text. Raises RequestError."""
        tools = read_json(prompt.tools, list[dict[str, Any]], "tools") if prompt.tools else None
        documents = read_json(prompt.documents, list[dict[str, Any]], "documents") if prompt.documents else None
        messages = read_messages(prompt.messages)
        if prompt.continue_final_message:
            messages = _with_tag(messages, prompt)
        variables = {"functions": _functions_text(tools or [])} | self._variables(prompt, now) | {"tools": tools or None}
        if documents:
            self._check_documents(prompt, variables, has_tools=bool(tools))
            variables["documents"] = documents
        param = "chat_template" if prompt.chat_template else "messages"
        try:
            text = self._render(prompt.chat_template, messages, variables, has_tools=bool(tools))
        except RequestError:
            raise
        except Exception as error:  # a template may raise anything, which fails only the request
            raise RequestError(f"the chat template failed: {failure_text(error)}", param=param) from error
        return _up_to_tag(text) if prompt.continue_final_message else text

    def _render(self, requested: str, messages: list[Message], variables: dict[str, Any], has_tools: bool) -> str:
        """Render with the request's own template, which is not trusted, or with one of the model's."""
        if requested and not self.has(requested):
            if not self._trusts_requests:
                raise RequestError(
                    "chat_template in requests is disabled; remove it, or start the server with --trust-request-chat-template",
                    param="chat_template",
                )
            return ChatTemplate(requested, self._marks, self._write_calls).render(messages, variables, self._max_characters)
        template = self._choose(requested, has_tools)
        if variables.get("reasoning_effort") == "none" and template.always_thinks:
            raise RequestError(
                (
                    "reasoning_effort: the chat template of this model cannot turn off reasoning; remove it, or send "
                    "thinking_token_budget 0"
                ),
                code="invalid_value",
                param="reasoning_effort",
            )
        return template.render(messages, variables, self._max_characters)

    def _check_documents(self, prompt: ChatPrompt, variables: dict[str, Any], has_tools: bool) -> None:
        if variables["documents"] is not None:
            raise RequestError("documents: also given in chat_template_kwargs; give them once", param="documents")
        is_own = prompt.chat_template and not self.has(prompt.chat_template)
        source = prompt.chat_template if is_own else self._choose(prompt.chat_template, has_tools).source
        if "documents" not in source:
            raise RequestError(
                "documents: this model's chat template does not support them; put their text into a message",
                param="documents",
            )

    def _choose(self, requested: str, has_tools: bool) -> ChatTemplate:
        if requested:
            return self._templates[requested]
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            known = f" (it has {', '.join(sorted(self._templates))}; choose one with chat_template)" if self._templates else ""
            raise RequestError(
                f"this model has no default chat template{known}; start with --chat-template, or send a text instead of "
                "messages",
                param="messages",
            )
        return self._templates[name]

    def _variables(self, prompt: ChatPrompt, now: datetime) -> dict[str, Any]:
        more = read_json(prompt.chat_template_kwargs or b"{}", dict[str, Any], "chat_template_kwargs")
        reserved = sorted(_RESERVED_VARIABLES.intersection(more))
        if reserved:
            names = ", ".join(reserved)
            raise RequestError(
                f"chat_template_kwargs cannot set {names}; use the request's own fields", param="chat_template_kwargs"
            )
        fixed: dict[str, Any] = {
            "documents": None,
            "add_generation_prompt": prompt.add_generation_prompt,
            "strftime_now": now.strftime,
            "datetime": now.strftime("%Y-%m-%d %H:%M:%S UTC"),
        }
        return {**self._special_tokens, **fixed, **more}


def _compiled(name: str, source: str, marks: Mapping[str, str], write_calls: WriteCalls) -> ChatTemplate:
    try:
        return ChatTemplate(source, marks, write_calls)
    except Exception as error:  # jinja2's own errors, and Python's on deep nesting
        raise CheckpointError(f"the model's chat template {name!r} does not compile: {failure_text(error)}") from error


def _functions_text(tools: list[dict[str, Any]]) -> str:
    """Return the tools' functions as JSON text, for Firefunction's template."""
    return json.dumps([tool.get("function", tool) for tool in tools], indent=4, ensure_ascii=False) if tools else "[]"


def _with_tag(messages: list[Message], prompt: ChatPrompt) -> list[Message]:
    """Return the messages with the tag at the end of the last one's text."""
    if prompt.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
            param="continue_final_message",
        )
    content = messages[-1]["content"]
    if isinstance(content, list):
        if not content or "text" not in content[-1]:
            raise RequestError("the final message has no text to continue", param="messages")
        tagged: Any = [*content[:-1], content[-1] | {"text": content[-1]["text"] + _CONTINUE_TAG}]
    else:
        tagged = (content or "") + _CONTINUE_TAG
    return [*messages[:-1], messages[-1] | {"content": tagged}]


def _up_to_tag(text: str) -> str:
    """Return the text up to the tag. If the template stripped the message (and so the tag's space), its own last spaces are
    removed too."""
    place = text.rfind(_CONTINUE_TAG.strip())
    if place < 0:
        raise RequestError("the chat template does not show the final message, so it cannot be continued", param="messages")
    return text[:place] if text.startswith(_CONTINUE_TAG, place) else text[:place].rstrip()
