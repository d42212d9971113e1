"""Pages of a list, as in OpenAI's routes: takes `limit`, `order` and `after`; returns `has_more` and the ids at both ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.datastructures import QueryParams

from api.schemas.requests import invalid, shown

T = TypeVar("T")
P = TypeVar("P", bound="Page[Any]")


class Page(msgspec.Struct, Generic[T], kw_only=True):
    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(kind: type[P], query: QueryParams, listed: Sequence[T], id_of: Callable[[T], str], *, usual: int, most: int) -> P:
    """Return the part of `listed` (the oldest first) that a query asks for. By default these are the `usual` newest items, the
    newest first; `most` is the largest `limit`. Raises 400 for an invalid query."""
    limit = whole_number("limit", query.get("limit") or str(usual), 1, most)
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order", f"expected 'asc' or 'desc', got {shown(order)}")
    found = list(listed if order == "asc" else reversed(listed))
    if after:
        ids = list(map(id_of, found))
        if after not in ids:
            raise invalid("after", f"no item has the id {shown(after)}; remove it, or send a last_id")
        found = found[ids.index(after) + 1 :]
    data = found[:limit]
    first_id, last_id = (id_of(data[0]), id_of(data[-1])) if data else (None, None)
    return kind(data=data, first_id=first_id, last_id=last_id, has_more=len(found) > limit)


def whole_number(param: str, text: str, least: int, most: int) -> int:
    """Read an integer of a query or form. Raises 400 if `text` is not an integer within these limits, or has more than 9
    digits."""
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise invalid(param, f"expected an integer from {least} to {most}, got {shown(text)}")
    return int(text)
