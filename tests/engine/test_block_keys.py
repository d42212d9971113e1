"""Block keys of prompts with media and masks: equal exactly where the inputs of the KV are equal."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.block_keys import BlockExtras, bounds_of_units, forward_spans, hash_blocks
from engine.messages import AdapterUse, MediaItem, MediaUnit
from tests.engine.scheduler.echo_media import causal, picture, prompt_of, values_of

BLOCK_SIZE = 4
CAT, DOG = picture("cat", 5), picture("dog", 5)


def described(parts: list[list[int] | MediaItem], sees: list[tuple[int, int, int]]) -> tuple[list[bytes], list[int]]:
    """Return the keys of a prompt, and the value of each token. `sees`: tokens with other first and last keys."""
    prompt, fields = prompt_of(*parts)
    bounds = causal(len(prompt)) if sees else []
    for position, before, ahead in sees:
        if position < len(prompt):
            bounds[2 * position : 2 * position + 2] = max(0, position - before), min(len(prompt) - 1, position + ahead)
    extras = BlockExtras.of(fields["units"], fields["media"], array("i", bounds).tobytes())
    keys: list[bytes] = []
    hash_blocks(array("i", prompt), BLOCK_SIZE, keys, len(prompt), extras)
    hashes = [fields["media"][unit.item].unit_hashes[unit.index] for unit in fields["units"]]
    return keys, values_of(prompt, fields["units"], hashes, bounds)


PARTS = st.lists(st.sampled_from([[1], [2], [1, 2, 3], CAT, DOG, picture("clip", 2, 2)]), min_size=1, max_size=5)
SEES = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14), st.integers(0, 6)), max_size=2)


@settings(max_examples=300)
@example([[1, 2, 3]], [[1], [2]], [(3, 0, 0)], [], True)  # another token in the place of one that sees itself alone
@given(PARTS, PARTS, SEES, SEES, st.booleans())
def test_keys_are_equal_exactly_where_inputs_are(
    first: list[list[int] | MediaItem],
    second: list[list[int] | MediaItem],
    first_sees: list[tuple[int, int, int]],
    second_sees: list[tuple[int, int, int]],
    is_same_mask: bool,
) -> None:
    keys, values = described([*first, *second], first_sees)
    other_keys, other_values = described([*first, *reversed(second)], first_sees if is_same_mask else second_sees)
    for index in range(min(len(keys), len(other_keys))):
        end = (index + 1) * BLOCK_SIZE
        assert (keys[index] == other_keys[index]) == (values[:end] == other_values[:end])


def test_unit_that_ends_at_a_block_is_outside() -> None:
    prompt, fields = prompt_of([1, 2, 3], CAT, [7] * 4)
    extras = BlockExtras.of(fields["units"], fields["media"], b"")
    assert extras is not None
    found = [extras.of_block(array("i", prompt), start, start + 4) for start in (0, 4, 8)]
    assert found == [((CAT.unit_hashes[0], 0),), ((CAT.unit_hashes[0], 1),), ()]


@pytest.mark.parametrize("parts", [[[1] * 12], [[1, 2], CAT, [3] * 5]])
def test_a_salt_parts_all_blocks_of_a_prompt(parts: list[list[int] | MediaItem]) -> None:
    prompt, fields = prompt_of(*parts)
    keys: dict[str, list[bytes]] = {"": [], "a": [], "b": []}
    for salt, own in keys.items():
        extras = BlockExtras.of(fields["units"], fields["media"], b"", salt)
        hash_blocks(array("i", prompt), BLOCK_SIZE, own, len(prompt), extras)
        again = BlockExtras.of(fields["units"], fields["media"], b"", salt)
        assert again is None or again.of_block(array("i", prompt), 4, 8) == BlockExtras(
            [(unit.start, unit.start + unit.num_tokens, CAT.unit_hashes[0]) for unit in fields["units"]]
        ).of_block(array("i", prompt), 4, 8), "the first block's alone"
    assert len({*keys[""], *keys["a"], *keys["b"]}) == 3 * len(keys[""])


def test_an_adapter_is_in_every_key() -> None:
    """Contents count, not names; no salt gives the same key."""
    tokens = array("i", range(12))
    adapters = [AdapterUse(1, 0, "ab" * 32), AdapterUse(2, 1, "ab" * 32), AdapterUse(3, 0, "cd" * 32), None]
    keys: list[list[bytes]] = [[] for _ in range(4)]
    for adapter, own in zip(adapters, keys, strict=True):
        hash_blocks(tokens, BLOCK_SIZE, own, 12, BlockExtras.of((), [], b"", "", adapter))
    assert keys[0] == keys[1]
    assert len({*keys[1], *keys[2], *keys[3]}) == 9
    of_adapter = BlockExtras.of((), [], b"", "salt", adapters[0])
    assert of_adapter is not None
    assert of_adapter.of_block(tokens, 0, 4) == ((b"\xab" * 32, -1), b"salt")
    assert of_adapter.of_block(tokens, 4, 8) == ((b"\xab" * 32, -1),)


def test_plain_text_has_no_extra_keys() -> None:
    assert BlockExtras.of((), [], b"") is None


def test_pictures_that_see_all_of_themselves_are_whole() -> None:
    units = [
        MediaUnit(0, 0, 2, 3, 1, 3, sees_all=True),
        MediaUnit(1, 0, 6, 2, 1, 2),
        MediaUnit(2, 0, 8, 2, 1, 2, sees_all=True),
    ]
    bounds = bounds_of_units(units)
    assert bounds.tolist() == [0, 0, 0, 1, 0, 4, 0, 4, 0, 4, 0, 5, 0, 6, 0, 7, 0, 9, 0, 9]
    assert forward_spans(bounds) == [(2, 5), (8, 10)]
    assert not bounds_of_units(units[1:2])


def test_spans() -> None:
    bounds = causal(10)
    bounds[3], bounds[5], bounds[13] = 3, 5, 7
    assert forward_spans(bounds) == [(1, 6), (6, 8)]
