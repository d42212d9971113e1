"""The vocabulary for a matcher: the bytes of each token, which tokens are special, and which end an answer.

Built by a tokenizer's helper from its `Vocabulary` when a request first has a format, and written to the run directory; ranks
read it there with the first grammar, in every life.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from engine.checkpoint.files import read_file
from engine.errors import TokamakError

_BRACKETS = (("<", ">"), ("[", "]"))
_SPECIAL = b"\xff"  # prefix of special tokens in llguidance


class GrammarTokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Token ids are in [0, num_tokens), the model's whole vocabulary; unused ids have no bytes."""

    data: bytes  # of all tokens, concatenated; special ones after a byte 0xff
    sizes: bytes  # uint32 [num_tokens]: bytes of each
    special_ids: list[int]  # grammars can name them, but no text contains them
    end_ids: list[int]  # the model's end tokens

    @staticmethod
    def of(
        token_bytes: list[bytes],
        special_ids: Iterable[int],
        added_ids: Iterable[int],
        end_ids: Iterable[int],
        vocab_size: int,
    ) -> GrammarTokens:
        """Build the table. Added tokens in brackets (`<tool_call>`) are special, as special ones are; other added tokens are
        frequent text."""
        marks = (token_id for token_id in added_ids if _is_mark(token_bytes[token_id].decode(errors="replace")))
        tokens = (token_bytes + [b""] * (vocab_size - len(token_bytes)))[:vocab_size]
        special = sorted(token_id for token_id in {*special_ids, *marks} if token_id < vocab_size)
        for token_id in special:
            tokens[token_id] = _SPECIAL + tokens[token_id]
        ends = [token_id for token_id in end_ids if token_id < vocab_size]
        return GrammarTokens(b"".join(tokens), array("I", map(len, tokens)).tobytes(), special, ends)

    @staticmethod
    def read(path: Path) -> GrammarTokens:
        """Read the tokens from the run's file."""
        try:
            return msgspec.msgpack.decode(read_file(path), type=GrammarTokens)
        except (OSError, msgspec.DecodeError) as error:
            raise TokamakError(f"cannot read {path}: {error}; restart the engine") from error

    @property
    def num_tokens(self) -> int:
        return len(self.sizes) // 4

    def write(self, path: Path) -> None:
        """Write the file atomically, even if other processes write the same."""
        if path.exists():
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(msgspec.msgpack.encode(self))
        os.replace(unfinished, path)

    def marks(self) -> dict[str, int]:
        """Return the special tokens by their non-empty text."""
        sizes, wanted = array("I", self.sizes), set(self.special_ids)
        found: dict[str, int] = {}
        begin = 0
        for token_id, size in enumerate(sizes):
            if token_id in wanted and size > len(_SPECIAL):
                found[self.data[begin + len(_SPECIAL) : begin + size].decode(errors="replace")] = token_id
            begin += size
        return found


def _is_mark(text: str) -> bool:
    return any(len(text) > 2 and text.startswith(left) and text.endswith(right) for left, right in _BRACKETS)


MakeTokens = Callable[[], GrammarTokens]
