"""What came of a step: samples get on, outputs go to their readers, samples end.

Used by the scheduler process alone. Whether a sample ends is decided here and nowhere else, from its tokens and its
parameters; what a step in flight computes beyond that end is dropped.
"""

from __future__ import annotations

from array import array

from engine.messages import Output, StepResult, TokenLogprobs
from engine.process.context import ActorContext
from engine.scheduler.batch_state import Roster
from engine.scheduler.dispatch import StepInFlight
from engine.scheduler.sequence import Sample, SampleState


def finish_reason_of(sample: Sample) -> str:
    """ "stop" or "length"; "" while there is more to come. Stop tokens count only after `min_tokens` others."""
    num_outputs = sample.num_output_tokens
    sampling = sample.request.sampling
    if num_outputs > sampling.min_tokens and sample.token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    is_full = len(sample.token_ids) >= sample.max_total_tokens
    is_prompt_done = num_outputs > 0 or sample.num_confirmed >= sample.num_prompt_tokens
    return "length" if is_full and is_prompt_done else ""


def ending_output(sample: Sample, finish_reason: str) -> Output:
    """The last word about a sample that ends without another token."""
    stop_token_id = sample.token_ids[-1] if finish_reason == "stop" else -1
    return Output(
        sample.request.request_id,
        sample.request.attempt,
        [],
        finish_reason,
        stop_token_id,
        sample.num_prompt_tokens,
        max(0, sample.num_cached_tokens),
    )


class Results:
    """Applies step results to the roster."""

    def __init__(self, context: ActorContext, roster: Roster) -> None:
        self._roster = roster
        self._prefill_time = context.histogram("request_prefill_time_seconds")
        self._decode_time = context.histogram("request_decode_time_seconds")
        self._inference_time = context.histogram("request_inference_time_seconds")

    def apply(self, step: StepInFlight, result: StepResult, now_ns: int) -> None:
        """Confirm the rows of `step`, append and hand on what they sampled."""
        columns = _Columns(result)
        assert len(columns.token_ids) == len(step.rows), f"step {step.step_id}: {len(columns.token_ids)} results"
        for index, row in enumerate(step.rows):
            sample = row.sample
            sample.num_in_flight -= 1
            if sample.state is not SampleState.FINISHED:
                sample.num_confirmed = row.start + row.num_tokens
                if index in result.prompt_rows and not sample.has_prompt_logprobs:
                    sample.prompt_logprobs.append(result.prompt_rows[index])
                if row.is_sampling:
                    sample.num_unknown -= 1
                    sample.token_ids.append(columns.token_ids[index])
                self._roster.share_blocks(sample)
                if row.is_sampling or sample.max_total_tokens == sample.num_prompt_tokens:
                    self._hand_on(sample, row.is_sampling, columns, index, now_ns)
            if not sample.num_in_flight:
                self._roster.landed(sample)

    def end(self, sample: Sample, now_ns: int) -> None:
        """The sample is complete."""
        if sample.first_token_ns:
            self._decode_time.observe((now_ns - sample.first_token_ns) / 1e9)
            self._inference_time.observe((now_ns - sample.first_scheduled_ns) / 1e9)
        self._roster.finish(sample)

    def _hand_on(self, sample: Sample, is_sampling: bool, columns: _Columns, index: int, now_ns: int) -> None:
        """The Output of a row, and the end of its sample where that is it."""
        finish_reason = finish_reason_of(sample)
        if not is_sampling and not finish_reason:
            return
        output = ending_output(sample, finish_reason)
        output.weight_version = columns.weight_version
        if is_sampling:
            output.token_ids = [columns.token_ids[index]]
            output.logprobs = [columns.logprobs_of(index)]
        if sample.wants_prompt_logprobs:
            output.prompt_logprobs = take_prompt_logprobs(sample)
        sample.reader.add(output)
        if not sample.first_token_ns:
            sample.first_token_ns = now_ns
            self._prefill_time.observe((now_ns - sample.first_scheduled_ns) / 1e9)
        if finish_reason:
            self.end(sample, now_ns)


class _Columns:
    """A result's arrays as lists."""

    __slots__ = ("_logprobs", "_ranks", "_top_rows", "token_ids", "weight_version")

    def __init__(self, result: StepResult) -> None:
        self.token_ids = array("i", result.token_ids).tolist()
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


def take_prompt_logprobs(sample: Sample) -> list[TokenLogprobs]:
    """Log-probabilities of all prompt tokens but the first, put together from the chunks; they are delivered once."""
    entries: list[TokenLogprobs] = []
    for chunk in sample.prompt_logprobs:
        logprobs, ranks = array("f", chunk.token_logprobs), array("i", chunk.token_ranks)
        top_ids, top_logprobs = array("i", chunk.top_token_ids).tolist(), array("f", chunk.top_logprobs).tolist()
        for offset in range(len(logprobs)):
            tops = slice(offset * chunk.num_top, (offset + 1) * chunk.num_top)
            token_id = sample.token_ids[chunk.start + offset]
            entries.append(TokenLogprobs(token_id, logprobs[offset], ranks[offset], top_ids[tops], top_logprobs[tops]))
    assert len(entries) == sample.num_prompt_tokens - 1, f"{len(entries)} of {sample.num_prompt_tokens - 1} prompt logprobs"
    sample.prompt_logprobs.clear()
    sample.has_prompt_logprobs = True
    return entries
