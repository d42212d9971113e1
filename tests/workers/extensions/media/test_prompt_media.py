"""Positions and feature rows of prompts with media, compared with a walk through the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import MediaUnit, SamplingParams, SlotStart
from tests.workers.serving import int32
from workers.extensions.media.prompt_media import PromptMedia

Unit = tuple[int, int, int, int, bool]  # text before it, height, width, time, is_continued


def units_of(shapes: list[Unit]) -> tuple[MediaUnit, ...]:
    units, at = [], 0
    for index, (text, height, width, time, is_continued) in enumerate(shapes):
        goes_on = is_continued and index > 0
        at += 0 if goes_on else text
        units.append(MediaUnit(index, 0, at, height * width, height, width, time, goes_on))
        at += height * width
    return tuple(units)


def start_of(units: tuple[MediaUnit, ...], num_tokens: int, rows: list[int]) -> SlotStart:
    hashes = tuple(bytes([index]) * 32 for index in range(len(units)))
    tokens = int32([1] * num_tokens)
    return SlotStart(0, "r", tokens, num_tokens, SamplingParams(), b"", units=units, unit_rows=int32(rows), unit_hashes=hashes)


def walk(units: tuple[MediaUnit, ...], rows: list[int], num_tokens: int) -> list[tuple[int, int, int, int]]:
    """Yield (time, height, width, feature row) of each token, one after another."""
    found: list[tuple[int, int, int, int]] = []
    largest, base = -1, 0
    beginning = {unit.start: index for index, unit in enumerate(units)}
    while len(found) < num_tokens:
        index = beginning.get(len(found))
        if index is None:
            largest += 1
            found.append((largest, largest, largest, -1))
            continue
        unit = units[index]
        if not unit.is_continued:
            base = largest + 1
        for row in range(unit.height):
            for column in range(unit.width):
                place = base + unit.time, base + row, base + column
                largest = max(largest, *place)
                number = row * unit.width + column
                found.append((*place, -1 if rows[index] < 0 else rows[index] + number))
    return found


SHAPES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 40), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(SHAPES, st.integers(0, 9), st.data())
def test_positions_of_any_part_of_a_prompt(shapes: list[Unit], text_behind: int, data: st.DataObject) -> None:
    units = units_of(shapes)
    end_of_media = units[-1].start + units[-1].num_tokens
    num_tokens = end_of_media + text_behind
    rows = [data.draw(st.integers(-1, 500)) for _ in units]
    media = PromptMedia.of(start_of(units, num_tokens, rows))
    assert media is not None
    expected = np.array(walk(units, rows, num_tokens + 3)).T  # generated tokens go on as text
    begin = data.draw(st.integers(0, num_tokens + 2))
    end = data.draw(st.integers(begin + 1, num_tokens + 3))
    axes, feature_rows = media.place(begin, end)
    np.testing.assert_array_equal(axes, expected[:3, begin:end])
    np.testing.assert_array_equal(feature_rows, expected[3, begin:end])
    np.testing.assert_array_equal(media.end, end_of_media)
    np.testing.assert_array_equal(np.arange(end_of_media, num_tokens + 3) + media.last_shift, expected[0, end_of_media:])
    overlapping = [index for index, unit in enumerate(units) if unit.start < end and begin < unit.start + unit.num_tokens]
    assert list(media.overlapping(begin, end)) == overlapping


def test_positions_equal_the_published_example() -> None:
    """Qwen2-VL's example: text, a picture of 2 x 3, text; and a video of two rows in time, three apart."""
    units = (MediaUnit(0, 0, 2, 6, 2, 3), MediaUnit(1, 0, 10, 2, 1, 2), MediaUnit(1, 1, 12, 2, 1, 2, 3, True))
    media = PromptMedia.of(start_of(units, 16, [40, 0, 7]))
    assert media is not None
    axes, rows = media.place(0, 16)
    assert axes[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 10, 10, 11, 12]
    assert axes[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 7, 7, 11, 12]
    assert axes[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 7, 8, 11, 12]
    assert rows.tolist() == [-1, -1, 40, 41, 42, 43, 44, 45, -1, -1, 0, 1, 7, 8, -1, -1]


def test_text_prompt_has_no_media() -> None:
    assert PromptMedia.of(start_of((), 5, [])) is None


@pytest.mark.parametrize(("start", "message"), [(3, "overlap"), (30, "beyond 20 prompt tokens")])
def test_overlapping_units_fail(start: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        PromptMedia.of(start_of((MediaUnit(0, 0, 2, 6, 2, 3), MediaUnit(1, 0, start, 6, 2, 3)), 20, [0, 9]))
