"""Samples that are prepared and not yet open: the text of what the edge already has is replayed first.

Used by the tokenizer's loop. Requests take turns, and a replay comes in pieces: neither a request of many samples nor one with
a long answer holds the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.messages import Request, SamplingParams, Submit, TokenizedPrompt
from engine.parsers.registry import Parsers
from engine.process.fair_queue import FairQueue
from engine.tokenizer.text_stream import TextStream
from engine.tokenizer.vocabulary import Vocabulary

SAMPLES_PER_TURN = 32  # of a request, so that they travel together
TOKENS_PER_TURN = 1024  # of a replay


@dataclass(slots=True, eq=False)
class Opening:
    """`sampling` is resolved, but for `max_tokens` and the sample's own index."""

    submit: Submit
    prompt: TokenizedPrompt
    sampling: SamplingParams
    stream: TextStream = field(init=False)
    is_begun: bool = False

    @property
    def key(self) -> str:
        return self.submit.key or self.submit.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids) // 4

    def advance(self, vocabulary: Vocabulary, parsers: Parsers | None) -> bool:
        """One piece of the replay; whether that was the last."""
        if not self.is_begun:
            self.is_begun = True
            prediction = self.sampling.prediction_token_ids
            self.stream = TextStream(self.submit, self.prompt, vocabulary, prediction, parsers)
        return self.stream.replay(TOKENS_PER_TURN)

    def request(self, tokenizer: str) -> Request:
        submit = self.submit
        return Request(
            request_id=submit.request_id,
            api=submit.api,
            api_epoch=submit.api_epoch,
            tokenizer=tokenizer,
            attempt=submit.attempt,
            prompt_token_ids=self.prompt.token_ids,
            resume_token_ids=submit.resume_token_ids,
            sampling=msgspec.structs.replace(
                self.sampling,
                sample_index=submit.sampling.sample_index,
                max_tokens=self.prompt.max_tokens,
                is_thinking=self.prompt.is_thinking,
            ),
            num_scored_prompt_tokens=submit.num_scored_prompt_tokens,
            group_id=submit.group_id,
            priority=submit.priority,
            arrival_ns=submit.arrival_ns,
            deadline_ns=submit.deadline_ns,
            media=submit.media,
            units=self.prompt.units,
            mask_bounds=submit.mask_bounds,
            options=submit.options,
            second_start=self.prompt.second_start,
            key=self.key,
            source=submit.source,
        )


class Openings:
    def __init__(self) -> None:
        self._queue: FairQueue[Opening] = FairQueue()
        self._by_id: dict[str, Opening] = {}
        self._num_in_turn = 0

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def add(self, opening: Opening) -> None:
        self._by_id[opening.submit.request_id] = opening
        self._queue.push(opening.key, opening)

    def next(self, vocabulary: Vocabulary, parsers: Parsers | None = None) -> Opening | None:
        """A piece of work on the sample whose turn it is: the sample, once it can be opened."""
        openings = self._queue.front()
        opening = openings[0]
        is_ready = opening.advance(vocabulary, parsers)
        if is_ready:
            openings.popleft()
            del self._by_id[opening.submit.request_id]
        self._num_in_turn += 1
        if not openings or not is_ready or self._num_in_turn >= SAMPLES_PER_TURN:
            self._num_in_turn = 0
            self._queue.pass_on()
        return opening if is_ready else None

    def attempt_of(self, request_id: str) -> int | None:
        opening = self._by_id.get(request_id)
        return None if opening is None else opening.submit.attempt

    def drop(self, request_id: str) -> None:
        opening = self._by_id.pop(request_id, None)
        if opening is not None:
            self._queue.remove(opening.key, opening)

    def drop_api(self, api: str) -> None:
        for request_id in [request_id for request_id, opening in self._by_id.items() if opening.submit.api == api]:
            self.drop(request_id)
