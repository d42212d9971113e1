"""One open sequence in the tokenizer: turns outputs of the scheduler into deltas for the api process.

Used by the tokenizer processes. A `TextStream` lives for one attempt of one sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.messages import DecodedLogprobs, Delta, Output, TokenLogprobs
from engine.parsers.registry import Parsers
from engine.tokenizer.detokenizer import Detokenizer
from engine.tokenizer.prediction import Prediction, PredictionCount
from engine.tokenizer.ready import ReadySequence
from engine.tokenizer.repetition import Repetition
from engine.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from engine.tokenizer.part_stream import PartStream


class TextStream:
    __slots__ = (
        "_detokenizer",
        "_is_stop_shown",
        "_is_token_shown",
        "_own_stop_token_ids",
        "_parts",
        "_prediction",
        "_prompt_token_ids",
        "_repetition",
        "_resumed",
        "_returns_prompt",
        "_scores_prompt",
        "_vocabulary",
        "api",
        "attempt",
        "group_id",
        "key",
        "refused_by",
        "replica",
        "request_id",
        "sequence",
    )

    def __init__(
        self,
        sequence: ReadySequence,
        vocabulary: Vocabulary,
        parsers: Parsers | None = None,
    ) -> None:
        """Tokens that the api process already has must be replayed."""
        own, asked, tokenized = sequence.own, sequence.request.asked, sequence.prompt.tokenized
        sampling, text, prompt_token_ids = asked.sampling, asked.text, tokenized.token_ids
        self._resumed = array("i", own.resume_token_ids)
        self.key = sequence.key
        self.request_id = own.request_id
        self.attempt = own.attempt
        self.api = asked.api
        self.group_id = own.group_id
        self.replica = -1  # its replica; -1: none
        self.sequence: ReadySequence | None = None  # kept while another replica may have to take it
        self.refused_by: frozenset[int] = frozenset()  # replicas that were full
        self._vocabulary = vocabulary
        self._prompt_token_ids = prompt_token_ids
        self._returns_prompt = text.return_prompt_token_ids and not self._resumed
        self._scores_prompt = sampling.num_prompt_logprobs >= 0 and not own.num_scored_prompt_tokens
        self._own_stop_token_ids = frozenset(sampling.stop_token_ids)
        prediction_token_ids = sequence.request.shared.sampling.prediction_token_ids
        self._prediction = PredictionCount(Prediction.of(prediction_token_ids)) if prediction_token_ids else None
        limits = text.repetition
        self._repetition = None if limits is None else Repetition(limits, sampling.min_tokens)
        self._is_stop_shown = text.include_stop_str_in_output
        self._is_token_shown = sampling.num_logprobs >= 0
        skipped_ids = vocabulary.special_ids if text.skip_special_tokens else frozenset()
        is_continuation = any(token_id not in skipped_ids for token_id in memoryview(prompt_token_ids).cast("i"))
        min_tokens = sampling.min_tokens
        parser = None
        if parsers is not None and text.parsing is not None:
            parser = parsers.parser_for(text.parsing, sequence.prompt.asked, own.request_id, tokenized.is_thinking)
        self._parts: PartStream | None = None
        self._detokenizer: Detokenizer
        if parsers is None or parser is None:
            self._detokenizer = Detokenizer(vocabulary, text, min_tokens=min_tokens, is_continuation=is_continuation)
        else:
            from engine.tokenizer.part_stream import PartStream  # only when a request needs it

            self._detokenizer = self._parts = PartStream(
                vocabulary,
                text,
                parser,
                parsers.marker_of_id,
                min_tokens=min_tokens,
                is_continuation=is_continuation,
            )

    def replay(self, max_tokens: int) -> bool:
        """Replay at most this many of the tokens that the api process has, and drop their text; return whether that was all."""
        self._detokenizer.push(self._resumed[:max_tokens])
        if self._parts is not None:
            self._parts.take_parts()
        self._count(self._resumed[:max_tokens])
        if self._repetition is not None:
            self._repetition.push(self._resumed[:max_tokens])
        del self._resumed[:max_tokens]
        return not self._resumed

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string, the only call or a repetition was found (more tokens may have been generated after it)."""
        return self._detokenizer.is_over or (self._repetition is not None and self._repetition.is_found)

    @property
    def has_found_string(self) -> bool:
        return self._detokenizer.stop_string is not None

    @property
    def num_tokens(self) -> int:
        """Number of decoded tokens."""
        return self._detokenizer.num_tokens

    @property
    def num_malformed_calls(self) -> int:
        """Number of texts that began like a call but were none."""
        return 0 if self._parts is None else self._parts.num_malformed_calls

    def take(self, output: Output) -> Delta:
        """Take the next tokens and return what they release. The last Delta of a sequence has a finish reason."""
        is_stop_hidden = output.stop_token_id >= 0 and not self._is_stop_shown
        token_ids, text = self._take_tokens(output.token_ids, is_stop_hidden)
        delta = Delta(
            request_id=self.request_id,
            attempt=self.attempt,
            token_ids=token_ids,
            text=text,
            finish_reason=output.finish_reason,
            num_prompt_tokens=output.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            weight_version=output.weight_version,
            replica=self.replica,
            num_computed_tokens=output.num_computed_tokens,
        )
        if output.logprobs:
            delta.logprobs = [self._decoded(entry, self._is_token_shown) for entry in output.logprobs[: len(token_ids)]]
        if output.pooled:
            delta.pooled = output.pooled
        if self._detokenizer.is_over:
            delta.finish_reason, delta.stop_reason = "stop", self._detokenizer.stop_string
        elif (self._repetition is not None and self._repetition.is_found) and (
            not output.finish_reason or len(token_ids) < len(output.token_ids)
        ):
            delta.text += self._detokenizer.finish()
            delta.finish_reason, delta.stop_reason = "repetition", "repetition_detected"
        elif output.finish_reason:
            delta.text += self._detokenizer.finish()
            if self._detokenizer.is_over:  # the end of the text completed it
                delta.finish_reason, delta.stop_reason = "stop", self._detokenizer.stop_string
            elif output.stop_token_id in self._own_stop_token_ids:
                delta.stop_reason = output.stop_token_id
        if self._parts is not None:
            delta.parts = self._parts.take_parts()
            delta.num_reasoning_tokens = self._parts.num_reasoning_tokens
        self._add_prompt(delta, output)
        if self._prediction is not None:
            self._count(token_ids)
        if delta.finish_reason and self._prediction is not None:
            delta.num_accepted_prediction_tokens = self._prediction.num_accepted
            delta.num_rejected_prediction_tokens = self._prediction.num_rejected
        return delta

    def already_stopped(self) -> Delta:
        """Return the last Delta, if the replayed tokens contained a stop string."""
        return self.take(Output(self.request_id, self.attempt, [], num_prompt_tokens=len(self._prompt_token_ids) // 4))

    def _take_tokens(self, token_ids: list[int], is_stop_hidden: bool) -> tuple[list[int], str]:
        """Return those of `token_ids` that count, up to the end of a stop string, and the text they release."""
        if self._repetition is not None and (num_counted := self._repetition.push(token_ids)) < len(token_ids):
            token_ids, is_stop_hidden = token_ids[:num_counted], False
        num_before = self._detokenizer.num_tokens
        text = self._detokenizer.push(token_ids[:-1] if is_stop_hidden else token_ids)
        if is_stop_hidden and not self._detokenizer.is_over:
            return token_ids, text
        return token_ids[: self._detokenizer.num_tokens - num_before], text

    def _count(self, token_ids: Iterable[int]) -> None:
        if self._prediction is not None:
            self._prediction.push(token_ids)

    def _add_prompt(self, delta: Delta, output: Output) -> None:
        """Add the requested parts of the prompt, each once."""
        if self._returns_prompt:
            self._returns_prompt = False
            delta.prompt_token_ids = self._prompt_token_ids
        if self._scores_prompt:
            self._scores_prompt = False
            first = array("i", self._prompt_token_ids[:4])
            delta.first_prompt_token = b"".join(map(self._vocabulary.bytes_of, first))
        if output.prompt_logprobs:
            delta.prompt_logprobs = [self._decoded(entry, True) for entry in output.prompt_logprobs]

    def _decoded(self, entry: TokenLogprobs, is_token_shown: bool) -> DecodedLogprobs:
        if not is_token_shown:
            return DecodedLogprobs(entry.token_id, entry.logprob, entry.rank, b"")
        bytes_of = self._vocabulary.bytes_of
        return DecodedLogprobs(
            entry.token_id,
            entry.logprob,
            entry.rank,
            bytes_of(entry.token_id),
            tuple(entry.top_token_ids),
            tuple(entry.top_logprobs),
            tuple(map(bytes_of, entry.top_token_ids)),
        )
