"""Hashes of items: different items have different ones."""

from __future__ import annotations

from engine.media.identity import HASH_BYTES, item_hash, unit_hash


def test_bytes_cut_elsewhere_are_another_item() -> None:
    facts = ("video", 3)
    names = [item_hash(facts, parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""])]
    names += [item_hash(("image", 3), [b"abc"]), item_hash(("video", 4), [b"abc"])]
    assert len({*names}) == len(names)
    assert all(len(name) == HASH_BYTES for name in names)
    assert item_hash(facts, [bytearray(b"abc")]) == names[2]


def test_units_have_hashes_of_their_own() -> None:
    items = [item_hash((), [bytes([number])]) for number in range(3)]
    units = {unit_hash(item, index) for item in items for index in range(3)}
    assert len(units | {*items}) == 12
