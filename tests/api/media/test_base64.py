"""Base64 of any length is decoded without blocking the event loop."""

from __future__ import annotations

import base64

from api.media.request import PIECE_CHARACTERS, decode_base64
from tests.api.media.loop_turns import run_and_count


def test_the_loop_has_a_turn_after_each_piece() -> None:
    num_pieces = 5
    content = bytes(range(256)) * (num_pieces * PIECE_CHARACTERS * 3 // 4 // 256)
    memory = memoryview(bytearray(len(content)))
    _, turns = run_and_count(decode_base64(base64.b64encode(content).decode(), memory))
    assert memory == content
    assert turns >= num_pieces
