"""The images and videos of a request body, in order, before they are fetched or decoded.

Used by the route handlers of the api process. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from api.schemas.requests import CompletionMedia
from engine.errors import RequestError

_KINDS = {"image_url": "image", "video_url": "video", "image_embeds": "image", "video_embeds": "video"}

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A media item as a client sent it."""

    path: str  # of its place in the body
    kind: str  # "image" | "video"
    content: str  # a link (also `data:`), or base64 of features
    is_features: bool = False
    grid_thw: Grid | None = None

    @property
    def identity(self) -> MediaPart:
        """Key that is equal for parts with the same item."""
        return replace(self, path="")


def take_parts(messages: list[Any]) -> list[MediaPart]:
    """Return the media parts of a checked conversation, and replace each by what a tokenizer needs of it."""
    parts = []
    for place, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part["type"] in _KINDS:
                parts.append(_part(part, f"messages[{place}].content[{index}]"))
                content[index] = {"type": parts[-1].kind}
    return parts


def completion_parts(body: CompletionMedia) -> list[MediaPart]:
    """Return the media parts of a bare prompt: images, then videos; of each kind first files, then encoded features."""
    data = body.multi_modal_data
    parts = []
    for kind, links, features, grids in (
        ("image", data and data.image, body.image_feature_urls, body.image_grid_thws),
        ("video", data and data.video, body.video_feature_urls, body.video_grid_thws),
    ):
        listed = [links] if isinstance(links, str) else links or []
        encoded = [features] if isinstance(features, str) else features or []
        parts += [MediaPart(f"multi_modal_data.{kind}[{index}]", kind, link) for index, link in enumerate(listed)]
        if len(encoded) != len(grids or ()):
            raise RequestError(
                (
                    f"{kind}_feature_urls has {len(encoded)} entries, but {kind}_grid_thws has {len(grids or ())}; send "
                    "one grid per entry"
                ),
                code="invalid_features",
                param=f"{kind}_grid_thws",
            )
        for index, (link, grid) in enumerate(zip(encoded, grids or (), strict=True)):
            parts.append(MediaPart(f"{kind}_feature_urls[{index}]", kind, link, True, _grid(grid)))
    return parts


def check_parts(parts: list[MediaPart], kinds: Collection[str], takes_features: bool, limits: Mapping[str, int]) -> None:
    """Check the parts without reading them. `kinds`: those that the model takes."""
    for part in parts:
        if part.kind not in kinds:
            taken = " and ".join(["text", *kinds])
            raise RequestError(
                f"{part.path}: this model accepts only {taken}; remove the {part.kind}",
                code="unsupported_media",
                param=part.path,
            )
    numbers = Counter(part.kind for part in parts)
    for kind, number in numbers.items():
        if number > limits[kind]:
            raise RequestError(
                (
                    f"the request has {number} {kind} items, limit {limits[kind]}; send fewer, or start the server with a "
                    "larger --limit-mm-per-prompt"
                ),
                code="too_many_items",
                param=[part.path for part in parts if part.kind == kind][limits[kind]],
            )
    for part in parts:
        if part.is_features and not takes_features:
            raise RequestError(
                f"{part.path}: encoded features are disabled; start the server with --enable-mm-embeds",
                code="unsupported_media",
                param=part.path,
            )


def _part(part: dict[str, Any], path: str) -> MediaPart:
    name = part["type"]
    kind = _KINDS[name]
    value = part.get(name)
    if not name.endswith("_embeds"):
        content = value.get("url") if isinstance(value, dict) else value
        return MediaPart(path, kind, _required(content, f"{path}.{name}"))
    holder = value if isinstance(value, dict) else part
    grid = holder.get(f"{kind}_grid_thw")
    if grid is None:
        raise RequestError(
            f"{path}: features need {kind}_grid_thw (patches in time, height, width)",
            code="invalid_features",
            param=path,
        )
    return MediaPart(path, kind, _required(holder.get(name), f"{path}.{name}"), True, _grid(grid))


def _required(content: str | None, path: str) -> str:
    if content is None:
        raise RequestError(f"{path} is required", code="missing_required_parameter", param=path)
    return content


def _grid(grid: list[int]) -> Grid:
    rows, height, width = grid
    return rows, height, width


def bounds_of(offsets: list[int | list[int]]) -> Iterator[int]:
    """Yield the first and last visible position of each token of `attention_mask_offset`."""
    last = len(offsets) - 1
    for place, entry in enumerate(offsets):
        first, end = (0, entry) if isinstance(entry, int) else (entry[0], entry[1])
        if not 0 <= first <= place <= end <= last:
            param = f"attention_mask_offset[{place}]"
            raise RequestError(
                (
                    f"{param}: token {place} cannot attend to keys {first} to {end}; expected 0 <= first <= {place} <= "
                    f"last <= {last}"
                ),
                code="invalid_value",
                param=param,
            )
        yield first
        yield end
