"""`GET /v1/models` and `/v1/models/{id}` in Anthropic's format, for clients that name a version of it. Runs in the api
process."""

from __future__ import annotations

from datetime import datetime, timezone

from starlette.datastructures import QueryParams

from api.anthropic.answers import AnthropicModel, AnthropicModelList
from api.model import ServedModel
from api.schemas.requests import invalid, shown

MAX_LIMIT = 1000


def card(model: ServedModel, name: str) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, timezone.utc).isoformat().replace("+00:00", "Z")
    return AnthropicModel(
        id=name, display_name=name, created_at=created, max_input_tokens=model.max_model_len, max_tokens=model.max_model_len
    )


def page(model: ServedModel, query: QueryParams) -> AnthropicModelList:
    """Return at most `limit` models, those after `after_id` or before `before_id`."""
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None:
        after = model.resolve(after)
    names = list(model.served())
    if after is not None:
        names = names[names.index(after) + 1 :] if after in names else []
    if before is not None:
        names = names[: names.index(before)] if before in names else []
    limit = query.get("limit", "20")
    if not (limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise invalid("limit", f"expected 1 to {MAX_LIMIT}, got {shown(limit)}")
    chosen = names[: int(limit)] if before is None else names[-int(limit) :]
    cards = [card(model, name) for name in chosen]
    return AnthropicModelList(
        data=cards,
        has_more=len(chosen) < len(names),
        first_id=chosen[0] if chosen else None,
        last_id=chosen[-1] if chosen else None,
    )
