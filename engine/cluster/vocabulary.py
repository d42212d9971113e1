"""Size of the vocabulary, by which links of engines and routers check token ids of their peers."""

from __future__ import annotations

import msgspec

from engine.process.run_directory import Run


class _Vocabulary(msgspec.Struct):
    vocab_size: int


class _Model(msgspec.Struct):
    """The part of `model.msgpack` that links need."""

    config: _Vocabulary


def vocab_size_of(run: Run) -> int:
    """Return how many token ids the model of a run has."""
    return msgspec.msgpack.decode(run.model_path.read_bytes(), type=_Model).config.vocab_size
