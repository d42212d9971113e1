"""Prepared sequences that are not open yet: tokens that the api process already has are replayed first.

Used by the tokenizer's loop. Requests take turns, and a replay is done in pieces, so that neither a request with many sequences
nor one with a long answer delays others.
"""

from __future__ import annotations

import msgspec

from engine.parsers.registry import Parsers
from engine.process.fair_queue import FairQueue
from engine.tokenizer.ready import ReadySequence
from engine.tokenizer.text_stream import TextStream
from engine.tokenizer.vocabulary import Vocabulary

SEQUENCES_PER_TURN = 32  # of a request, so that they are sent together
TOKENS_PER_TURN = 1024  # of a replay


class Opening(msgspec.Struct, eq=False):
    sequence: ReadySequence
    stream: TextStream | None = None  # created when its turn has come

    def advance(self, vocabulary: Vocabulary, parsers: Parsers | None) -> TextStream | None:
        """Replay one piece; return the stream if that was the last one."""
        if self.stream is None:
            self.stream = TextStream(self.sequence, vocabulary, parsers)
        return self.stream if self.stream.replay(TOKENS_PER_TURN) else None


class Openings:
    def __init__(self) -> None:
        self._queue: FairQueue[str, Opening] = FairQueue()
        self._by_id: dict[str, Opening] = {}
        self._num_in_turn = 0

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def add(self, sequence: ReadySequence) -> None:
        opening = self._by_id[sequence.own.request_id] = Opening(sequence)
        self._queue.push(sequence.key, opening)

    def next(self, vocabulary: Vocabulary, parsers: Parsers | None = None) -> tuple[ReadySequence, TextStream] | None:
        """Work on the sequence that has its turn; return the sequence and its stream once it can be opened."""
        openings = self._queue.front()
        sequence = openings[0].sequence
        stream = openings[0].advance(vocabulary, parsers)
        if stream is not None:
            openings.popleft()
            del self._by_id[sequence.own.request_id]
        self._num_in_turn += 1
        if not openings or stream is None or self._num_in_turn >= SEQUENCES_PER_TURN:
            self._num_in_turn = 0
            self._queue.pass_on()
        return None if stream is None else (sequence, stream)

    def attempt_of(self, request_id: str) -> int | None:
        opening = self._by_id.get(request_id)
        return None if opening is None else opening.sequence.own.attempt

    def drop(self, request_id: str) -> None:
        opening = self._by_id.pop(request_id, None)
        if opening is not None:
            self._queue.remove(opening.sequence.key, opening)

    def drop_api(self, api: str) -> None:
        for request_id in [
            request_id for request_id, opening in self._by_id.items() if opening.sequence.request.shared.api == api
        ]:
            self.drop(request_id)
