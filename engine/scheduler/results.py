"""Handles step results: sequences get tokens, outputs go to the tokenizers, complete sequences end.

Used by the scheduler process alone. Only this module decides whether a sequence ends, from its tokens and parameters; tokens
that a step in flight computes beyond the end are dropped. Ranks that see the same stop token skip such rows
(`BatchSlots.is_ended`), only to save time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from engine.errors import RequestError
from engine.messages import Output, PromptLogprobs, Rejected, SequenceRequest, StepResult, TokenLogprobs
from engine.process.context import ActorContext
from engine.scheduler.batch_state import BatchState
from engine.scheduler.dispatch import StepInFlight
from engine.scheduler.sequence import Sequence, SequenceState

MAX_PART_VALUES = 512  # prompt log-probabilities in one Output: small for any ring, and quickly converted to text


def finish_reason_of(sequence: Sequence) -> str:
    """Return "stop", "length", or "" if the sequence continues. Stop tokens count only after `min_tokens` others. With a
    grammar they always count, because ranks sample one only when the answer is complete."""
    num_outputs = sequence.num_output_tokens
    sampling = sequence.request.sampling
    counts = num_outputs > sampling.min_tokens or (num_outputs > 0 and sampling.grammar is not None)
    if counts and sequence.token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    is_full = len(sequence.token_ids) >= sequence.max_total_tokens
    is_prompt_done = num_outputs > 0 or sequence.num_confirmed >= sequence.num_prompt_tokens
    return "length" if is_full and is_prompt_done else ""


def ending_output(sequence: Sequence, finish_reason: str) -> Output:
    """Return the final output of a sequence that ends without another token."""
    stop_token_id = sequence.token_ids[-1] if finish_reason == "stop" else -1
    return Output(
        sequence.request.own.request_id,
        sequence.request.own.attempt,
        [],
        finish_reason,
        stop_token_id,
        sequence.num_prompt_tokens,
        max(0, sequence.num_cached_tokens),
    )


def rejection(request: SequenceRequest, error: RequestError) -> Rejected:
    """Return the message to the user of a request that does not run."""
    return Rejected(
        request.own.request_id,
        request.own.attempt,
        request.shared.api,
        error.status,
        error.message,
        error.code,
        error.param,
        error.retry_after_s,
    )


class Results:
    """Applies step results to the batch."""

    def __init__(self, context: ActorContext, batch: BatchState) -> None:
        self._batch = batch
        self._prefill_time = context.histogram("request_prefill_time_seconds")
        self._decode_time = context.histogram("request_decode_time_seconds")
        self._inference_time = context.histogram("request_inference_time_seconds")

    def apply(self, step: StepInFlight, result: StepResult, now_ns: int) -> list[int]:
        """Confirm the rows of `step`, append and send what they sampled; return the number of tokens taken from each row."""
        columns = _Columns(result)
        assert len(columns.counts) == len(step.rows), f"step {step.step_id}: {len(columns.counts)} results"
        first = 0
        num_taken = [0] * len(step.rows)
        has_windows = bool(self._batch.windowed)
        self._batch.num_wanted_by_new_requests = result.num_wanted_by_new_requests
        for index, row in enumerate(step.rows):
            sequence, count = row.sequence, columns.counts[index]
            sequence.num_in_flight -= 1
            if sequence.state is not SequenceState.FINISHED and row.is_sampling and not count:
                sequence.drew_nothing(row.start + row.num_tokens, row.num_drafts)
                self._batch.discard_states(sequence)
            elif sequence.state is not SequenceState.FINISHED:
                sequence.num_confirmed = row.start + row.num_tokens
                end, num_accepted = sequence.num_confirmed, 0
                if index in result.prompt_rows:
                    self._hand_on_prompt(sequence, result.prompt_rows[index], columns.weight_version)
                if row.is_sampling:
                    assert 1 <= count <= 1 + row.num_drafts, f"{count} tokens with {row.num_drafts} drafts"
                    end, num_accepted = len(sequence.token_ids), count - 1
                    sequence.num_unknown -= 1
                    sequence.num_ahead -= row.num_drafts
                    sequence.num_computed += num_accepted
                    sequence.num_wanted = columns.num_wanted[index]
                    count = num_taken[index] = _append(sequence, columns.token_ids[first : first + count])
                self._batch.share_blocks(sequence)
                self._batch.confirm_states(sequence, end, num_accepted)
                if has_windows:
                    self._batch.free_behind_windows(sequence)
                if sequence.is_reporting:
                    self._report(sequence)
                if index in result.failed:
                    self._fail(sequence, result.failed[index])
                elif row.is_sampling or sequence.max_total_tokens == sequence.num_prompt_tokens:
                    pooled = result.pooled.get(index, b"")
                    self._hand_on(sequence, columns, range(first, first + count), now_ns, pooled)
            first += columns.counts[index]
            if not sequence.num_in_flight:
                sequence.draw_again(self._batch.limits.first_position)
                self._batch.release_drained(sequence)
        return num_taken

    def end(self, sequence: Sequence, now_ns: int) -> None:
        """End a complete sequence."""
        if sequence.first_token_ns:
            self._decode_time.observe((now_ns - sequence.first_token_ns) / 1e9)
            self._inference_time.observe((now_ns - sequence.first_scheduled_ns) / 1e9)
        self._batch.finish(sequence)

    def _report(self, sequence: Sequence) -> None:
        """Report how much of the prompt is computed; the first token comes after the last report."""
        output = ending_output(sequence, "")
        output.num_computed_tokens = min(sequence.num_confirmed, sequence.num_prompt_tokens)
        sequence.reader.add(output)
        sequence.is_reporting = output.num_computed_tokens < sequence.num_prompt_tokens

    def _fail(self, sequence: Sequence, cause: str) -> None:
        """End only this sequence: its structured output exceeds a limit."""
        error = RequestError(f"the structured output exceeds the limits of the engine: {cause}", code="invalid_value")
        sequence.reader.reject(rejection(sequence.request, error))
        self._batch.finish(sequence)

    def _hand_on_prompt(self, sequence: Sequence, chunk: PromptLogprobs, weight_version: int) -> None:
        for part in prompt_parts(sequence, chunk):
            output = ending_output(sequence, "")
            output.weight_version, output.prompt_logprobs = weight_version, part
            sequence.reader.add(output)

    def _hand_on(self, sequence: Sequence, columns: _Columns, indexes: range, now_ns: int, pooled: bytes = b"") -> None:
        """Send the Output of a row, and end its sequence if it is complete."""
        finish_reason = finish_reason_of(sequence)
        if not indexes and not finish_reason:
            return
        output = ending_output(sequence, finish_reason)
        output.weight_version = columns.weight_version
        output.token_ids = columns.token_ids[indexes.start : indexes.stop]
        output.logprobs = [columns.logprobs_of(index) for index in indexes]
        output.pooled = pooled
        sequence.reader.add(output)
        if not sequence.first_token_ns:
            sequence.first_token_ns = now_ns
            self._prefill_time.observe((now_ns - sequence.first_scheduled_ns) / 1e9)
        if finish_reason:
            self.end(sequence, now_ns)


def _append(sequence: Sequence, token_ids: list[int]) -> int:
    """Append a row's tokens up to one that ends the sequence; return how many. The KV of all known tokens except the last is
    computed."""
    num_before = len(sequence.token_ids)
    for token_id in token_ids:
        sequence.num_confirmed = len(sequence.token_ids)
        sequence.token_ids.append(token_id)
        if finish_reason_of(sequence):
            break
    return len(sequence.token_ids) - num_before


class _Columns:
    """A result's arrays as lists."""

    __slots__ = ("_logprobs", "_ranks", "_top_rows", "counts", "num_wanted", "token_ids", "weight_version")

    def __init__(self, result: StepResult) -> None:
        self.token_ids = array("i", result.token_ids).tolist()
        self.counts = array("i", result.counts).tolist()
        self.num_wanted = array("i", result.num_wanted or bytes(len(result.counts))).tolist()
        self.weight_version = result.weight_version
        self._logprobs = array("f", result.logprobs).tolist()
        self._ranks = array("i", result.ranks).tolist()
        self._top_rows = result.top_rows

    def logprobs_of(self, index: int) -> TokenLogprobs:
        tops = self._top_rows.get(index)
        if tops is None:
            return TokenLogprobs(self.token_ids[index], self._logprobs[index], self._ranks[index])
        top_ids, top_logprobs = array("i", tops[0]).tolist(), array("f", tops[1]).tolist()
        return TokenLogprobs(self.token_ids[index], self._logprobs[index], self._ranks[index], top_ids, top_logprobs)


def prompt_parts(sequence: Sequence, chunk: PromptLogprobs) -> Iterator[list[TokenLogprobs]]:
    """Yield the log-probabilities of a chunk of the prompt in parts of at most MAX_PART_VALUES, without those delivered before
    (a prompt is computed again after a preemption or a crash)."""
    logprobs, ranks = array("f", chunk.token_logprobs).tolist(), array("i", chunk.token_ranks).tolist()
    top_ids, top_logprobs = array("i", chunk.top_token_ids).tolist(), array("f", chunk.top_logprobs).tolist()
    num_known = sequence.num_scored_prompt_tokens + 1 - chunk.start
    assert num_known >= 0, f"{-num_known} prompt tokens have no log-probabilities"
    part: list[TokenLogprobs] = []
    for offset in range(num_known, len(logprobs)):
        tops = slice(offset * chunk.num_top, (offset + 1) * chunk.num_top)
        token_id = sequence.token_ids[chunk.start + offset]
        part.append(TokenLogprobs(token_id, logprobs[offset], ranks[offset], top_ids[tops], top_logprobs[tops]))
        if len(part) * (1 + chunk.num_top) >= MAX_PART_VALUES or offset + 1 == len(logprobs):
            sequence.num_scored_prompt_tokens += len(part)
            yield part
            part = []
