"""Prompts and conversations of the types that vLLM accepts, and their conversion to fields of a request."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast


class TextPrompt(TypedDict, total=False):
    prompt: str  # required
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]  # required
    prompt: str  # its text, for the output
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
_KNOWN = {"prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs", "cache_salt"}


class Prompt:
    """Prompt: the value of the field `prompt` or `input`, fields that belong to it, and its text if known."""

    def __init__(self, given: Any, where: str) -> None:
        """Convert a prompt. TypeError and ValueError name its position, `where`."""
        self.extra: dict[str, Any] = {}
        self.text: str | None = None
        self.content: str | list[int]
        if isinstance(given, Mapping):
            self._take(given, where)
        elif isinstance(given, str):
            self.content = self.text = given
        else:
            self.content = _token_ids(given, where)

    @property
    def token_ids(self) -> list[int] | None:
        return self.content if isinstance(self.content, list) else None

    def _take(self, given: Mapping[str, Any], where: str) -> None:
        unknown = set(given) - _KNOWN
        if any(given[name] is not None for name in unknown):
            raise ValueError(f"{where} has {', '.join(sorted(unknown))}; known are {', '.join(sorted(_KNOWN))}")
        text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
        if text is None and token_ids is None:
            raise ValueError(f"{where} has neither prompt nor prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{where}: prompt is a {type(text).__name__}, expected a text")
        self.text = text
        self.content = cast(str, text) if token_ids is None else _token_ids(token_ids, where)
        for name in ("mm_processor_kwargs", "cache_salt"):
            if given.get(name) is not None:
                self.extra[name] = given[name]
        media = given.get("multi_modal_data") or {}
        if media:
            self.extra["multi_modal_data"] = {kind: _links(value) for kind, value in media.items() if value is not None}


def prompts_of(given: Any) -> list[Prompt]:
    """Convert one prompt or several; a list of integers is one."""
    is_one = isinstance(given, (str, Mapping)) or not isinstance(given, Iterable)
    if not is_one:
        given = list(given)
        is_one = bool(given) and isinstance(given[0], int)
    return [Prompt(each, f"prompts[{index}]") for index, each in enumerate([given] if is_one else given)]


def conversations_of(messages: Any) -> list[list[Message]]:
    """Convert one conversation or several."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise TypeError(f"messages is a {type(messages).__name__}, expected a list of messages, or of such lists")
    is_one = not messages or isinstance(messages[0], Mapping)
    conversations = [messages] if is_one else messages
    return [[_message(message) for message in conversation] for conversation in conversations]


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a {type(message).__name__}, expected a dictionary with role and content")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    """Convert a part of a message; pictures in memory become links that contain them."""
    if isinstance(part, Mapping) and part.get("image_pil") is not None:
        return {"type": "image_url", "image_url": {"url": _link(part["image_pil"])}}
    return part


def _links(media: Any) -> list[str]:
    return [_link(each) for each in (media if isinstance(media, (list, tuple)) else [media])]


def _link(medium: Any) -> str:
    """Return a link for a PIL image, the bytes of a file, or a link."""
    if isinstance(medium, str):
        return medium
    kind = "application/octet-stream"
    if not isinstance(medium, bytes):
        if not hasattr(medium, "save"):
            raise TypeError(f"a {type(medium).__name__} is no picture; expected one of PIL's, the bytes of a file, or a link")
        buffer = io.BytesIO()
        medium.save(buffer, format="PNG")
        medium, kind = buffer.getvalue(), "image/png"
    return f"data:{kind};base64,{base64.b64encode(medium).decode()}"


def _token_ids(given: Any, where: str) -> list[int]:
    """Return the token ids in a list, or in an array of any library."""
    try:
        return [int(token_id) for token_id in (given.tolist() if hasattr(given, "tolist") else given)]
    except (TypeError, ValueError):
        raise TypeError(
            f"{where} is a {type(given).__name__}; expected a text, token ids, or a dictionary with one of them"
        ) from None
