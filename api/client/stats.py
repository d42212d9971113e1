"""Metrics of sequences in an api process: tokens, latencies, and how they ended. Written by `client.EngineClient`."""

from __future__ import annotations

from api.client.generation import Generation, OpenSequence
from engine.metric_labels import RESUBMISSION_CAUSES
from engine.process.context import ActorContext
from engine.process.topology import SCHEDULER, index_of, places_of, role_of

FINISH_REASONS = ("stop", "length", "repetition", "abort", "timeout")


class SequenceMeasures:
    """Metrics of sequences. Times are in ns, CLOCK_MONOTONIC."""

    def __init__(self, context: ActorContext) -> None:
        self._prompt_tokens = context.counter("prompt_tokens_total")
        self._generation_tokens = context.counter("generation_tokens_total")
        self._finished = {reason: context.counter("request_success_total", finished_reason=reason) for reason in FINISH_REASONS}
        self._time_to_first_token = context.histogram("time_to_first_token_seconds")
        self._inter_token_latency = context.histogram("inter_token_latency_seconds")
        self._recovery = context.histogram("recovery_seconds")
        self._time_per_output_token = context.histogram("request_time_per_output_token_seconds")
        self._latency = context.histogram("e2e_request_latency_seconds")
        self._request_prompt_tokens = context.histogram("request_prompt_tokens")
        self._request_generation_tokens = context.histogram("request_generation_tokens")
        self._max_generation_tokens = context.histogram("request_max_num_generation_tokens")
        self._num_sequences = context.histogram("request_params_n")
        self._max_tokens = context.histogram("request_params_max_tokens")

    def on_opened(self, generation: Generation) -> None:
        """Count a new request with all its sequences."""
        self._num_sequences.observe(len(generation.sequences))
        max_tokens = generation.shared.sampling.max_tokens
        if max_tokens > 0:
            self._max_tokens.observe(max_tokens)

    def on_closed(self, generation: Generation) -> None:
        """Count a request when its last sequence has ended."""
        self._max_generation_tokens.observe(max(len(sequence.delivered) for sequence in generation.sequences))

    def on_tokens(self, sequence: OpenSequence, num_tokens: int, now_ns: int) -> None:
        """Count delivered tokens."""
        if not num_tokens:
            return
        self._generation_tokens.add(num_tokens)
        if sequence.interrupted_ns:
            self._recovery.observe((now_ns - (sequence.last_token_ns or sequence.interrupted_ns)) / 1e9)
            sequence.interrupted_ns = 0
        if sequence.first_token_ns:
            self._inter_token_latency.observe((now_ns - sequence.last_token_ns) / 1e9)
        else:
            sequence.first_token_ns = now_ns
            self._time_to_first_token.observe((now_ns - sequence.generation.shared.arrival_ns) / 1e9)
        sequence.last_token_ns = now_ns

    def on_finished(self, reason: str) -> None:
        """Count a sequence that ended, for any reason."""
        self._finished[reason].add(1)

    def on_answered(self, sequence: OpenSequence, now_ns: int) -> None:
        """Count a sequence that ended by itself."""
        num_tokens = len(sequence.delivered)
        self._prompt_tokens.add(sequence.num_prompt_tokens)
        self._request_prompt_tokens.observe(sequence.num_prompt_tokens)
        self._request_generation_tokens.observe(num_tokens)
        self._latency.observe((now_ns - sequence.generation.shared.arrival_ns) / 1e9)
        if num_tokens > 1:
            self._time_per_output_token.observe((sequence.last_token_ns - sequence.first_token_ns) / 1e9 / (num_tokens - 1))


class Resubmissions:
    """Counts resubmitted sequences by what was lost."""

    def __init__(self, context: ActorContext) -> None:
        self._by_cause = [context.counter("resubmissions_total", cause=cause) for cause in RESUBMISSION_CAUSES]
        self._by_replica = [
            context.counter("replica_resubmissions_total", replica=str(index)) for index in range(len(context.schedulers))
        ]
        self._causes = {name: context.counters.counter("loss_cause", name) for name in places_of(context.peers())}

    def add(self, name: str, num_sequences: int) -> None:
        """Count sequences that were lost with the actor `name`."""
        found = self._causes.get(name)  # a router knows what happened to its engines
        cause = RESUBMISSION_CAUSES.index(role_of(name)) if found is None else int(found.value)
        self._by_cause[cause].add(num_sequences)
        if role_of(name) == SCHEDULER:
            self._by_replica[index_of(name)].add(num_sequences)
