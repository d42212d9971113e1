"""`truncation: "auto"`: drops items of a conversation from a prompt that would be too long. Runs in the api process.

The oldest are dropped first: whole turns while there are several, then the assistant's items within the last one. Instructions
and the last message of the user stay.
"""

from __future__ import annotations

from starlette.requests import Request

from api.request_context import RequestContext
from api.responses.conversation import ResponseTranslation, translate
from api.responses.requests import (
    AdditionalToolsItem,
    CustomOutputItem,
    FunctionOutputItem,
    InputItem,
    InputTokensRequest,
    LocalShellOutputItem,
    MessageItem,
    ResponsesRequest,
    ToolSearchOutputItem,
)
from api.translation import count_translated
from engine.errors import RequestError

_OUTPUTS = (FunctionOutputItem, CustomOutputItem, LocalShellOutputItem, ToolSearchOutputItem)
_TOO_LONG = "context_length_exceeded"


async def fitted(
    request: Request, body: InputTokensRequest, items: list[InputItem], num_past: int, compacts: bool = False
) -> ResponseTranslation:
    """Return the chat request of a conversation, truncated if necessary and if the body allows that."""
    translation = translate(body, items, num_past, compacts)
    if body.truncation == "auto":
        return await truncated(request, body, items, num_past, compacts) or translation
    return translation


async def truncated(
    request: Request, body: InputTokensRequest, items: list[InputItem], num_past: int, compacts: bool
) -> ResponseTranslation | None:
    """Return the chat request with as many items as fit beside an answer; None: all fit, or no choice does."""
    limit = RequestContext.of(request).services.model.max_model_len
    max_tokens = body.max_output_tokens if isinstance(body, ResponsesRequest) else None

    async def fits(kept: frozenset[int] | None, num_answer_tokens: int) -> bool:
        translation = translate(body, items, num_past, compacts, kept)
        try:
            return await count_translated(request, translation) <= limit - num_answer_tokens
        except RequestError as error:
            if error.code != _TOO_LONG:
                raise
            return False

    if await fits(None, min(max_tokens or 1, limit // 2)):
        return None
    choices = choices_of(items)
    low, high = 0, len(choices)  # choices before `low` are too long, those from `high` on fit
    while low < high:
        middle = (low + high) // 2
        if await fits(choices[middle], min(max_tokens or limit // 4, limit // 2)):
            high = middle
        else:
            low = middle + 1
    if low == len(choices):
        return None
    translation = translate(body, items, num_past, compacts, choices[low])
    translation.dropped.append(f"truncation: {len(items) - len(choices[low])} items")
    return translation


def choices_of(items: list[InputItem]) -> list[frozenset[int]]:
    """Return the possible sets of kept items (by index), from most to fewest."""
    fixed = {index for index, item in enumerate(items) if _is_fixed(item)}
    users = [index for index, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]
    choices = [fixed | set(range(begin, len(items))) for begin in users[1:]]
    last = users[-1] if users else -1
    begins = [
        index
        for index in range(last + 2, len(items))
        if not isinstance(items[index], _OUTPUTS) and isinstance(items[index - 1], (MessageItem, *_OUTPUTS))
    ]
    own = {last} if users else set[int]()
    choices += [fixed | own | set(range(begin, len(items))) for begin in begins]
    return [frozenset(choice) for choice in choices]


def _is_fixed(item: InputItem) -> bool:
    if isinstance(item, MessageItem):
        return item.role in ("system", "developer")
    return isinstance(item, AdditionalToolsItem)
