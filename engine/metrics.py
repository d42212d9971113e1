"""The one list of all metrics: those of each role, with kind, unit and help.

The supervisor creates the counters file from it (one cell per metric and actor, each with one writer; of draft positions only
those in use). `/metrics`, `tokamak top` and `tokamak ctl counters` print whatever the file has, so a new metric is one line
here and one call where it happens. Names and meanings follow vLLM's where it has the metric; `/metrics` prints them with the
prefix `tokamak:` (`--metrics-prefix`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import DRAFT_METHODS, MAX_DRAFTS, MAX_LORAS, MAX_REPLICAS
from engine.metric_labels import (
    DEVICE_DTYPES,
    ENGINE_STATES,
    HTTP_ROUTES,
    HTTP_STATUSES,
    OP_CANDIDATES,
    OTHER_ROUTE,
    REPLICA_GAUGES,
    RESUBMISSION_CAUSES,
    ROW_CANDIDATES,
    WEIGHT_CACHE_OUTCOMES,
)
from engine.parallel.routing import REASONS

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STEP_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SAMPLES = (1, 2, 5, 10, 20)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metric(msgspec.Struct, frozen=True):
    """A metric: `labels` are fixed label pairs; the actor's name is added as label `actor` by the counters file."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()  # upper bucket bounds of a histogram, ascending, without +Inf

    def place(self, label: str) -> int:
        """Return the draft position, adapter slot or replica that this metric counts; -1: none."""
        return int(dict(self.labels).get(label, -1))


def _histogram(name: str, help: str, bounds: tuple[float, ...] = SECONDS, unit: str = "seconds") -> Metric:
    return Metric(name, "histogram", unit, help, (), bounds)


def _finished(reason: str) -> Metric:
    return Metric("request_success_total", "counter", "requests", "Finished sequences.", (("finished_reason", reason),))


def _http_durations() -> tuple[Metric, ...]:
    text = "Duration of HTTP requests, including streams to their end, by route."
    return tuple(
        Metric(
            "http_request_duration_seconds", "histogram", "seconds", text, (("route", route), ("status", status)), HTTP_SECONDS
        )
        for route in (*HTTP_ROUTES, OTHER_ROUTE)
        for status in HTTP_STATUSES
    )


def _spans(outcome: str) -> Metric:
    return Metric("otlp_spans_total", "counter", "spans", "Request spans, by outcome.", (("outcome", outcome),))


def _grammars(outcome: str) -> Metric:
    return Metric(
        "grammars_total", "counter", "requests", "Grammars of structured output, by outcome.", (("outcome", outcome),)
    )


def _responses(status: str) -> Metric:
    return Metric("http_responses_total", "counter", "responses", "HTTP responses by status class.", (("status", status),))


def _cache_loads(found: str) -> Metric:
    return Metric(
        "weight_cache_loads_total", "counter", "loads", "Weight loads by state of the weight cache.", (("found", found),)
    )


def _multiplies(dtype: str) -> Metric:
    return Metric("device_multiplies", "gauge", "", "1: the device supports this type.", (("dtype", dtype),))


def _copies(end: str) -> Metric:
    return Metric("device_copies_total", "counter", "copies", "Copies between host and device, by direction.", (("to", end),))


def _op_fallbacks() -> tuple[Metric, ...]:
    text = "Ops that failed the startup check on the device, so that the next candidate is used."
    return tuple(
        Metric("op_fallbacks_total", "counter", "ops", text, (("op", op), ("candidate", candidate)))
        for op, candidates in (*OP_CANDIDATES.items(), *ROW_CANDIDATES.items())
        for candidate in candidates
    )


def _by_position(name: str, help: str) -> tuple[Metric, ...]:
    """Return a metric for each draft token of a row, the first one at position 0."""
    places = range(MAX_DRAFTS)
    return tuple(Metric(name, "counter", "tokens", help, (("position", str(place)),)) for place in places)


def _by_method(name: str, help: str) -> tuple[Metric, ...]:
    return tuple(Metric(name, "counter", "tokens", help, (("method", method),)) for method in DRAFT_METHODS)


def _prepared(outcome: str) -> Metric:
    return Metric("media_items_total", "counter", "items", "Images and videos inspected.", (("outcome", outcome),))


def _by_replica(name: str, help: str, *labels: tuple[str, str]) -> tuple[Metric, ...]:
    """Return a metric for each replica, which on a router is a place for one."""
    return tuple(
        Metric(name, "counter", "samples", help, (*labels, ("replica", str(replica)))) for replica in range(MAX_REPLICAS)
    )


def _routes(reason: str) -> tuple[Metric, ...]:
    return _by_replica("requests_routed_total", "Sequences by replica and the reason for its choice.", ("reason", reason))


def _resubmissions(cause: str) -> Metric:
    text = "Sequences resubmitted after a crash, by what was lost."
    return Metric("resubmissions_total", "counter", "samples", text, (("cause", cause),))


def _by_adapter(name: str, help: str) -> tuple[Metric, ...]:
    return tuple(Metric(name, "gauge", "samples", help, (("adapter_slot", str(slot)),)) for slot in range(MAX_LORAS))


EVERY_ROLE = (
    Metric("messages_received_total", "counter", "messages", "Records received through the mailbox."),
    Metric("messages_sent_total", "counter", "messages", "Records sent."),
    Metric("messages_dropped_total", "counter", "messages", "Records dropped as outdated (older attempt or epoch)."),
    Metric("ring_full_total", "counter", "events", "Sends that failed because a ring was full."),
    Metric("cpu_seconds_total", "counter", "seconds", "CPU time of the process."),
    Metric("resident_memory_bytes", "gauge", "bytes", "Resident memory of the process."),
)

BY_ROLE: dict[str, tuple[Metric, ...]] = {
    "supervisor": (
        Metric("actor_restarts_total", "counter", "restarts", "Restarts of actors after a crash."),
        Metric(
            "supervisor_lines_dropped_total", "counter", "lines", "Supervisor log lines dropped because stderr was not read."
        ),
        Metric("actor_hangs_total", "counter", "hangs", "Actors killed because they sent no heartbeat."),
        Metric("run_files_made_again_total", "counter", "files", "Files of the run that others removed while it was running."),
        Metric("is_run_incomplete", "gauge", "runs", "1 while removed files cannot be restored; see the error log."),
        Metric("adapters_version", "gauge", "", "Number of changes to the loaded adapters."),
        Metric("num_adapters", "gauge", "adapters", "LoRA adapters in memory, including those being unloaded."),
        Metric("start_seconds", "gauge", "seconds", "Time from launch until ready."),
    ),
    "api": (
        Metric("http_requests_total", "counter", "requests", "HTTP requests received."),
        *(_responses(status) for status in HTTP_STATUSES),
        *_http_durations(),
        Metric("http_disconnects_total", "counter", "requests", "Clients that disconnected before their answer was complete."),
        Metric("open_requests", "gauge", "samples", "Open sequences in the API."),
        *_by_adapter("adapter_open_requests", "Open sequences of an adapter in the API."),
        Metric("open_calls", "gauge", "calls", "Calls of /tokenize and /detokenize in progress."),
        Metric(
            "cancelled_calls_total",
            "counter",
            "calls",
            "Calls of /tokenize and /detokenize that timed out (30 s) or were abandoned.",
        ),
        Metric("media_held_bytes", "gauge", "bytes", "Bytes received of media files of open requests."),
        Metric("media_fetches_total", "counter", "links", "Media fetches."),
        Metric("media_fetches_failed_total", "counter", "links", "Failed media fetches."),
        _histogram("media_fetch_seconds", "Duration of media fetches."),
        *(_spans(outcome) for outcome in ("sent", "lost")),
        Metric("stream_pauses_total", "counter", "samples", "Sequences paused because their client reads too slowly."),
        Metric("held_logprobs", "gauge", "logprobs", "Log-probabilities that clients have not read yet."),
        *(_resubmissions(cause) for cause in RESUBMISSION_CAUSES),
        *_by_replica("replica_resubmissions_total", "Sequences resubmitted because their replica was lost."),
        _histogram("recovery_seconds", "Pause of a resubmitted sequence: from its last token to the next one."),
        *(_finished(reason) for reason in ("stop", "length", "repetition", "abort", "timeout")),
        Metric("prompt_tokens_total", "counter", "tokens", "Prompt tokens of answered requests."),
        Metric("generation_tokens_total", "counter", "tokens", "Generated tokens."),
        _histogram("time_to_first_token_seconds", "Time from arrival to the first token."),
        _histogram("inter_token_latency_seconds", "Time between two deliveries of a sequence.", STEP_SECONDS),
        _histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a sequence, after the first.", STEP_SECONDS
        ),
        _histogram("e2e_request_latency_seconds", "Time from arrival to the end of a sequence."),
        _histogram("request_prompt_tokens", "Prompt tokens per sequence.", TOKENS, "tokens"),
        _histogram("request_generation_tokens", "Generated tokens per sequence.", TOKENS, "tokens"),
        _histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest sequence of a request.", TOKENS, "tokens"
        ),
        _histogram("request_params_n", "Sequences per request (n).", SAMPLES, "samples"),
        _histogram("request_params_max_tokens", "max_tokens of requests that set it.", TOKENS, "tokens"),
    ),
    "media": (
        *(_prepared(outcome) for outcome in ("good", "refused")),
        Metric("media_units_total", "counter", "units", "Media units decoded."),
        Metric("media_bytes_total", "counter", "bytes", "Bytes of files inspected or decoded."),
        Metric("pixel_slab_used_bytes", "gauge", "bytes", "Bytes of pixels that the scheduler has not released yet."),
        Metric("units_waiting", "gauge", "units", "Media units that wait for decoding or for memory."),
        _histogram("media_prepare_seconds", "Time to inspect a file: headers, tokens, hash.", STEP_SECONDS),
        _histogram("media_decode_seconds", "Time to decode the pixels of a media unit.", STEP_SECONDS),
    ),
    "tokenizer": (
        Metric("tokenized_tokens_total", "counter", "tokens", "Prompt tokens encoded."),
        Metric("detokenized_tokens_total", "counter", "tokens", "Output tokens decoded."),
        Metric("open_streams", "gauge", "samples", "Sequences being detokenized."),
        *(metric for reason in REASONS for metric in _routes(reason)),
        Metric(
            "streams_crossed_total",
            "counter",
            "samples",
            "Started sequences that continue with other weights or kernels, since no replica is left that has theirs.",
        ),
        Metric("stop_strings_total", "counter", "samples", "Sequences that ended at a stop string."),
        Metric("tool_calls_total", "counter", "calls", "Tool calls parsed in answers."),
        Metric("malformed_tool_calls_total", "counter", "calls", "Tool calls that could not be parsed and were left as text."),
        Metric("reasoning_tokens_total", "counter", "tokens", "Reasoning tokens."),
        *(_grammars(outcome) for outcome in ("compiled", "refused")),
        _histogram("grammar_compile_seconds", "Time to prepare a request with structured output.", STEP_SECONDS),
        Metric("helper_jobs_total", "counter", "jobs", "Jobs given to helper processes."),
        Metric("helper_jobs_waiting", "gauge", "jobs", "Jobs that wait for a helper process."),
        Metric("helper_jobs_refused_total", "counter", "jobs", "Jobs rejected because too many waited (429)."),
        Metric("helper_jobs_cancelled_total", "counter", "jobs", "Jobs dropped because their request had ended."),
    ),
    "link": (
        *(
            Metric(
                "router_engines",
                "gauge",
                "engines",
                "Engines of a router: ready, quiet (no new requests), leaving (not on the list any more), or gone.",
                (("state", state),),
            )
            for state in ENGINE_STATES
        ),
        Metric("orders_in_progress", "gauge", "orders", "Orders of a router's operator that its engines carry out."),
        Metric("link_peers", "gauge", "routers", "Routers that are connected to this engine."),
        Metric("link_open_sequences", "gauge", "sequences", "Open sequences of routers."),
        Metric("link_received_bytes_total", "counter", "bytes", "Bytes received from other machines."),
        Metric("link_sent_bytes_total", "counter", "bytes", "Bytes sent to other machines."),
        Metric("link_missed_heartbeats_total", "counter", "heartbeats", "Heartbeats that an engine did not answer in time."),
        Metric("link_sessions_ended_total", "counter", "sessions", "Sessions with a router or an engine that ended."),
    ),
    "scheduler": (
        Metric("num_requests_running", "gauge", "samples", "Sequences in the batch."),
        Metric("num_requests_waiting", "gauge", "samples", "Waiting sequences."),
        *_by_adapter("adapter_requests_running", "Sequences of an adapter in the batch."),
        *_by_adapter("adapter_requests_waiting", "Waiting sequences of an adapter."),
        Metric("kv_cache_usage_perc", "gauge", "ratio", "Share of KV blocks used by running sequences, 0 to 1."),
        Metric("num_kv_blocks", "gauge", "blocks", "Total KV blocks."),
        Metric("num_free_kv_blocks", "gauge", "blocks", "KV blocks not used by a running sequence, including cached ones."),
        Metric("num_free_slots", "gauge", "slots", "Free batch slots."),
        Metric("num_tokens_to_compute", "gauge", "tokens", "Prompt tokens of running and waiting sequences left to compute."),
        Metric("num_cached_kv_blocks", "gauge", "blocks", "KV blocks in the prefix cache, each in all layers."),
        Metric("prefix_cache_queries_total", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
        Metric("prefix_cache_hits_total", "counter", "tokens", "Prompt tokens found in the prefix cache."),
        Metric("num_states", "gauge", "slots", "Total slots for states of recurrent layers."),
        Metric("num_used_states", "gauge", "slots", "State slots that running sequences hold."),
        Metric("num_cached_states", "gauge", "slots", "States kept for later requests, including those in use."),
        Metric("state_cache_hits_total", "counter", "samples", "Sequences that continued from a kept state."),
        Metric("state_cache_evictions_total", "counter", "slots", "Kept states evicted for lack of slots."),
        Metric("mm_cache_queries_total", "counter", "units", "Media units looked up in the encoder cache."),
        Metric("mm_cache_hits_total", "counter", "units", "Media units found in the encoder cache, or being encoded."),
        Metric("encoder_calls_total", "counter", "calls", "Calls of the vision encoder."),
        Metric("encoder_units_total", "counter", "units", "Media units in calls of the vision encoder."),
        Metric("encoder_rows_total", "counter", "rows", "Rows of features in calls of the vision encoder."),
        Metric("encoder_losses_total", "counter", "units", "Media units encoded again because a rank did not have them."),
        Metric("encoder_evictions_total", "counter", "units", "Media units evicted from the encoder cache."),
        Metric("encoder_cache_usage_perc", "gauge", "ratio", "Share of the encoder cache in use, 0 to 1."),
        Metric("num_encoder_cache_units", "gauge", "units", "Media units in the encoder cache."),
        Metric("spec_decode_num_drafts_total", "counter", "rows", "Rows with draft tokens."),
        Metric("spec_decode_num_draft_tokens_total", "counter", "tokens", "Draft tokens verified."),
        Metric("spec_decode_num_accepted_tokens_total", "counter", "tokens", "Draft tokens accepted."),
        *_by_position("spec_decode_num_draft_tokens_per_pos_total", "Draft tokens verified."),
        *_by_position("spec_decode_num_accepted_tokens_per_pos_total", "Draft tokens accepted."),
        *_by_position("spec_decode_num_emitted_tokens_per_pos_total", "Accepted draft tokens that became part of an answer."),
        Metric("spec_decode_num_rows_total", "counter", "rows", "Rows that produced tokens, with or without draft tokens."),
        Metric("spec_decode_num_resting", "gauge", "rows", "Rows of the last step without draft tokens."),
        Metric("num_preemptions_total", "counter", "samples", "Sequences preempted because KV blocks ran out."),
        Metric("requests_aborted_total", "counter", "samples", "Aborted sequences."),
        Metric("requests_rejected_total", "counter", "samples", "Rejected sequences (queue full, or too large)."),
        Metric("slow_streams", "gauge", "samples", "Sequences paused because their client reads too slowly."),
        Metric("engine_weight_version", "gauge", "version", "Version of the weights in use; 0 while they are cleared."),
        Metric("engine_state", "gauge", "state", "0 normal, 1 paused, 2 cleared, 3 loading."),
        Metric("is_record_unwritten", "gauge", "runs", "1 while weights.json cannot be written; the engine waits for that."),
        Metric("steps_total", "counter", "steps", "Completed steps."),
        Metric("steps_dispatched_again_total", "counter", "steps", "Steps lost with a worker and sent again."),
        Metric("scheduled_tokens_total", "counter", "tokens", "Tokens computed in prefill and decode."),
        _histogram("iteration_tokens_total", "Tokens per step.", TOKENS, "tokens"),
        _histogram("request_queue_time_seconds", "Time from arrival until a sequence is first scheduled."),
        _histogram("request_prefill_time_seconds", "Time from first scheduled to first token."),
        _histogram("request_decode_time_seconds", "Time from first token to the end."),
        _histogram("request_inference_time_seconds", "Time from first scheduled to the end."),
        _histogram("step_schedule_seconds", "Time to schedule and encode a step.", STEP_SECONDS),
        _histogram("step_dispatch_seconds", "Time from the dispatch of a step to its start on the rank.", STEP_SECONDS),
        _histogram("step_run_seconds", "Model time of a step on the rank.", STEP_SECONDS),
        _histogram("step_sample_seconds", "Sampling time of a step on the rank.", STEP_SECONDS),
        _histogram("step_return_seconds", "Time from the end of sampling until the result is handled.", STEP_SECONDS),
    ),
    "cache": (
        Metric("kv_events_total", "counter", "events", "KV events published."),
        Metric("kv_arena_bytes", "gauge", "bytes", "Size of the KV arena."),
        Metric("kv_arena_reserved_bytes", "gauge", "bytes", "Reserved memory of the KV arena."),
    ),
    "worker": (
        Metric("worker_steps_total", "counter", "steps", "Steps run."),
        Metric("worker_step", "gauge", "step", "Number of the last step started."),
        Metric("worker_tokens_total", "counter", "tokens", "Tokens computed."),
        Metric("constrained_tokens_total", "counter", "tokens", "Tokens sampled under a grammar or reasoning limit."),
        Metric("constraint_wait_seconds_total", "counter", "seconds", "Time that steps waited for grammar masks."),
        Metric("constraint_failures_total", "counter", "samples", "Sequences that ended at a limit of their grammar."),
        Metric("worker_busy_seconds_total", "counter", "seconds", "Time in steps."),
        Metric("encoder_seconds_total", "counter", "seconds", "Time in layers of the vision encoder."),
        Metric("worker_idle_seconds_total", "counter", "seconds", "Time between steps while requests were running."),
        Metric("rank_group_epoch", "gauge", "epoch", "Epoch of its rank group that this rank joined last; 0: it has no peers."),
        Metric("collectives_total", "counter", "calls", "Collectives that this rank joined, including gathers in steps."),
        Metric("collective_wait_seconds_total", "counter", "seconds", "Time spent waiting for peers in collectives."),
        Metric("rank_group_steps_total", "counter", "steps", "Steps of the expert-parallel rank group run by this rank."),
        Metric("empty_rank_group_steps_total", "counter", "steps", "Steps of the rank group in which this rank had no rows."),
        Metric("eplb_rebalances_total", "counter", "rebalances", "Expert placements applied by this rank."),
        Metric("eplb_moved_experts_total", "counter", "experts", "Experts moved, over all layers."),
        Metric("eplb_predicted_imbalance", "gauge", "ratio", "Predicted rows of the busiest rank, divided by the mean."),
        Metric("weights_bytes", "gauge", "bytes", "Size of the weights in use."),
        Metric("rank_weight_version", "gauge", "version", "Version of the weights of this rank; 0 while they are cleared."),
        Metric("uncaptured_step_sizes", "gauge", "sizes", "Step sizes that could not be captured and run op by op."),
        Metric("captured_step_sizes", "gauge", "sizes", "Captured step sizes."),
        _histogram("captured_step_rows", "Rows of replayed captured steps, including padding.", TOKENS, "rows"),
        _histogram("eager_step_rows", "Rows of steps that were run op by op although capturing is on.", TOKENS, "rows"),
        *(_copies(end) for end in ("device", "host")),
        Metric("device_wait_seconds_total", "counter", "seconds", "Time spent waiting for results of the device."),
        Metric("device_memory_bytes", "gauge", "bytes", "Device memory of the rank's tensors after loading."),
        Metric("device_has_graphs", "gauge", "", "1: the device replays captured graphs."),
        Metric("device_keeps_cache", "gauge", "", "1: the KV cache survives a restart of this process."),
        *(_multiplies(dtype) for dtype in DEVICE_DTYPES),
        *_op_fallbacks(),
        Metric("weights_load_seconds", "gauge", "seconds", "Duration of the last weight load."),
        *(_cache_loads(found) for found in WEIGHT_CACHE_OUTCOMES),
        Metric("spec_decode_draft_seconds_total", "counter", "seconds", "Time spent drafting."),
        *_by_method("spec_decode_num_draft_tokens_by_method_total", "Draft tokens verified."),
        *_by_method("spec_decode_num_accepted_tokens_by_method_total", "Draft tokens accepted."),
        Metric("spec_decode_index_bytes", "gauge", "bytes", "Memory of the indexes used for drafting."),
    ),
}


OF_PLACES = (  # `scheduler<k>` of a router, which its link writes
    *(metric for metric in BY_ROLE["scheduler"] if metric.name in (*REPLICA_GAUGES, "engine_weight_version")),
    Metric("loss_cause", "gauge", "", "Why the replica was lost last: its position in RESUBMISSION_CAUSES."),
)


def metrics_of(role: str) -> tuple[Metric, ...]:
    """Return the metrics that an actor of `role` writes."""
    return EVERY_ROLE + BY_ROLE[role]
