"""Input items of a stored response, for `GET /v1/responses/{id}/input_items`. Pure."""

from __future__ import annotations

from typing import Any

from api.responses.items import digest

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def identified(response_id: str, index: int, item: dict[str, Any]) -> dict[str, Any]:
    """Return item `index` with an id, the same in every call; a message gets its content as parts, and the status completed."""
    shown = dict(item)
    prefix = _PREFIXES.get(item.get("type", ""), "item")
    shown["id"] = item.get("id") or f"{prefix}_{digest(f'{response_id}.input.{index}')}"
    if item.get("type") == "message":
        shown.setdefault("status", "completed")
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            part = {"type": kind, "text": item["content"]}
            shown["content"] = [part | {"annotations": []} if kind == "output_text" else part]
    return shown
