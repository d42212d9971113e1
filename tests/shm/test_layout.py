"""The layout table: complete, without overlaps, and hashed the same on both sides."""

from __future__ import annotations

import pytest

from shm import _native, layout
from shm.errors import SharedMemoryError


def fields_of(struct: str) -> dict[str, tuple[int, int]]:
    return {name: place for name, place in _native.LAYOUT[struct].items() if name}


@pytest.mark.parametrize("struct", _native.LAYOUT)
def test_fields_lie_inside_their_struct_and_apart(struct: str) -> None:
    end = 0
    for offset, num_bytes in sorted(fields_of(struct).values()):
        assert offset >= end
        end = offset + num_bytes
    assert end <= layout.size_of(struct)


@pytest.mark.parametrize("struct", _native.LAYOUT)
def test_words_of_two_processes_share_no_line(struct: str) -> None:
    if struct.endswith(("Line", "Lines", "Entry")):
        assert layout.size_of(struct) % layout.LINE == 0


def test_hash_covers_the_table() -> None:
    """FNV-1a, implemented here in Python, over the text that the C++ constant covers."""
    value = 0xCBF29CE484222325

    def mix(number: int) -> None:
        nonlocal value
        for byte in number.to_bytes(8, "little"):
            value = (value ^ byte) * 0x100000001B3 % 2**64

    mix(layout.LAYOUT_VERSION)
    for struct, fields in _native.LAYOUT.items():
        for name, (offset, num_bytes) in fields.items():
            for character in (struct + name).encode():
                mix(character)
            mix(offset)
            mix(num_bytes)
    assert value == layout.LAYOUT_HASH


def test_magic_reads_as_text() -> None:
    assert layout.MAGIC.to_bytes(8, "little") == b"TOKAMAK1"


def test_text_fields_hold_utf8_up_to_their_size() -> None:
    view = layout.StructView("WriterLine", memoryview(bytearray(128)))
    view.set_text("owner", "æ" * 15)
    assert view.text("owner") == "æ" * 15
    view.set_text("owner", "b")
    assert view.text("owner") == "b"
    with pytest.raises(SharedMemoryError, match="has 32 bytes, the limit is 31"):
        view.set_text("owner", "æ" * 16)


def test_words_of_both_sizes() -> None:
    view = layout.StructView("WriterLine", memoryview(bytearray(128)))
    view.set_word("epoch", 2**32 - 1)
    view.set_word("tail", 2**64 - 1)
    assert (view.word("epoch"), view.word("tail"), view.word("seq")) == (2**32 - 1, 2**64 - 1, 0)
    with pytest.raises(TypeError):
        view.set_word("epoch", 2**32)
