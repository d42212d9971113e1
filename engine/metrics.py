"""Names of all metrics, once: the rows of each role, with kind, unit and help.

The supervisor makes the counters file from these rows (one cell per row and actor, each with one writer; of draft positions
those that the engine has). `/metrics`, `tokamak top` and `tokamak ctl counters` print whatever rows the file has, so a new
metric is one line here and one call where it happens. Names and meanings follow vLLM's where it has one; `/metrics` prints them
with the prefix `tokamak:` (`--metrics-prefix`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import DRAFT_METHODS, MAX_DRAFTS, MAX_LORAS
from engine.metric_labels import (
    DEVICE_DTYPES,
    HTTP_ROUTES,
    HTTP_STATUSES,
    OP_CANDIDATES,
    OTHER_ROUTE,
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
    """A row: `labels` are fixed label pairs; the actor's name is added as label `actor` by the counters file."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()  # upper bucket bounds of a histogram, ascending, without +Inf

    def place(self, label: str) -> int:
        """Which of a row's drafts, or of the adapters' slots, is counted here alone; -1: none."""
        return int(dict(self.labels).get(label, -1))


def _histogram(name: str, help: str, bounds: tuple[float, ...] = SECONDS, unit: str = "seconds") -> Metric:
    return Metric(name, "histogram", unit, help, (), bounds)


def _finished(reason: str) -> Metric:
    return Metric("request_success_total", "counter", "requests", "Finished samples.", (("finished_reason", reason),))


def _http_durations() -> tuple[Metric, ...]:
    text = "Whole requests, streams to their end, by the beginning of their path."
    return tuple(
        Metric(
            "http_request_duration_seconds", "histogram", "seconds", text, (("route", route), ("status", status)), HTTP_SECONDS
        )
        for route in (*HTTP_ROUTES, OTHER_ROUTE)
        for status in HTTP_STATUSES
    )


def _spans(outcome: str) -> Metric:
    return Metric("otlp_spans_total", "counter", "spans", "Spans of requests, by what became of them.", (("outcome", outcome),))


def _grammars(outcome: str) -> Metric:
    return Metric("grammars_total", "counter", "requests", "Forms that answers were to have.", (("outcome", outcome),))


def _responses(status: str) -> Metric:
    return Metric("http_responses_total", "counter", "responses", "HTTP responses by class.", (("status", status),))


def _cache_loads(found: str) -> Metric:
    return Metric("weight_cache_loads_total", "counter", "loads", "Loads by what the weight cache had.", (("found", found),))


def _multiplies(dtype: str) -> Metric:
    return Metric("device_multiplies", "gauge", "", "1: the device multiplies in this type.", (("dtype", dtype),))


def _copies(end: str) -> Metric:
    return Metric("device_copies_total", "counter", "copies", "Copies to the device, or to the host.", (("to", end),))


def _op_fallbacks() -> tuple[Metric, ...]:
    text = "Fused ops, or CUDA's, that are not right on the rank's device, where the next candidate is taken."
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
    return Metric("media_items_total", "counter", "items", "Pictures and videos looked at.", (("outcome", outcome),))


def _routes(reason: str) -> Metric:
    return Metric("requests_routed_total", "counter", "samples", "Samples by what chose their replica.", (("reason", reason),))


def _by_adapter(name: str, help: str) -> tuple[Metric, ...]:
    return tuple(Metric(name, "gauge", "samples", help, (("adapter_slot", str(slot)),)) for slot in range(MAX_LORAS))


EVERY_ROLE = (
    Metric("messages_received_total", "counter", "messages", "Ring records taken from the mailbox."),
    Metric("messages_sent_total", "counter", "messages", "Ring records sent."),
    Metric("messages_dropped_total", "counter", "messages", "Records dropped: of an older attempt or epoch, or stale."),
    Metric("ring_full_total", "counter", "events", "Sends refused because a ring was full."),
    Metric("cpu_seconds_total", "counter", "seconds", "Processor time of the process."),
    Metric("resident_memory_bytes", "gauge", "bytes", "Resident memory of the process."),
)

BY_ROLE: dict[str, tuple[Metric, ...]] = {
    "supervisor": (
        Metric("actor_restarts_total", "counter", "restarts", "Actors started again after a death."),
        Metric("supervisor_lines_dropped_total", "counter", "lines", "Lines of the supervisor dropped: stderr was not read."),
        Metric("actor_hangs_total", "counter", "hangs", "Actors killed because they hung."),
        Metric("run_files_made_again_total", "counter", "files", "Files of the run that were removed under the engine."),
        Metric("is_run_incomplete", "gauge", "runs", "1 while such files cannot be made again; the error log says why."),
        Metric("adapters_version", "gauge", "", "Changes of what adapters are served."),
        Metric("num_adapters", "gauge", "adapters", "LoRA adapters in the arena, those that leave included."),
        Metric("start_seconds", "gauge", "seconds", "Time from the launch to ready."),
    ),
    "api": (
        Metric("http_requests_total", "counter", "requests", "HTTP requests received."),
        *(_responses(status) for status in HTTP_STATUSES),
        *_http_durations(),
        Metric("http_disconnects_total", "counter", "requests", "Clients that left before their answer ended."),
        Metric("open_requests", "gauge", "samples", "Samples that the edge holds open."),
        *_by_adapter("adapter_open_requests", "Samples of an adapter that the edge holds open."),
        Metric("open_calls", "gauge", "calls", "Calls of /tokenize and /detokenize under way."),
        Metric("cancelled_calls_total", "counter", "calls", "Such calls given up: the client left, or 30 s were over."),
        Metric("media_held_bytes", "gauge", "bytes", "Files of pictures and video of open requests, as far as they came."),
        Metric("media_fetches_total", "counter", "links", "Links of pictures, video and features that were fetched."),
        Metric("media_fetches_failed_total", "counter", "links", "Those that led to nothing."),
        _histogram("media_fetch_seconds", "Fetching a link."),
        *(_spans(outcome) for outcome in ("sent", "lost")),
        Metric("stream_pauses_total", "counter", "samples", "Samples paused because too much waits for their client."),
        Metric("held_logprobs", "gauge", "logprobs", "Log-probabilities held for clients that have not read them yet."),
        Metric("resubmissions_total", "counter", "samples", "Samples submitted again after a crash behind the edge."),
        *(_finished(reason) for reason in ("stop", "length", "repetition", "abort", "timeout")),
        Metric("prompt_tokens_total", "counter", "tokens", "Prompt tokens of answered samples."),
        Metric("generation_tokens_total", "counter", "tokens", "Tokens generated and delivered to the edge."),
        _histogram("time_to_first_token_seconds", "From arrival to the first token at the edge."),
        _histogram("inter_token_latency_seconds", "Between two deliveries of one sample.", STEP_SECONDS),
        _histogram("request_time_per_output_token_seconds", "Mean per sample, after its first token.", STEP_SECONDS),
        _histogram("e2e_request_latency_seconds", "From arrival to the end of a sample."),
        _histogram("request_prompt_tokens", "Prompt tokens of a sample.", TOKENS, "tokens"),
        _histogram("request_generation_tokens", "Generated tokens of a sample.", TOKENS, "tokens"),
        _histogram("request_max_num_generation_tokens", "Of the samples of a request, the longest.", TOKENS, "tokens"),
        _histogram("request_params_n", "Samples that a request asks for.", SAMPLES, "samples"),
        _histogram("request_params_max_tokens", "Tokens that a sample may have, where a request says it.", TOKENS, "tokens"),
    ),
    "media": (
        *(_prepared(outcome) for outcome in ("good", "refused")),
        Metric("media_units_total", "counter", "units", "Units whose pixels or features were made."),
        Metric("media_bytes_total", "counter", "bytes", "Bytes of files that were looked at or decoded."),
        Metric("pixel_slab_used_bytes", "gauge", "bytes", "Pixels that the scheduler has yet to let go of."),
        Metric("units_waiting", "gauge", "units", "Units that wait for their turn, or for room in the pixel slab."),
        _histogram("media_prepare_seconds", "Looking at a file: headers, tokens, identity.", STEP_SECONDS),
        _histogram("media_decode_seconds", "Making the pixels of a unit.", STEP_SECONDS),
    ),
    "tokenizer": (
        Metric("tokenized_tokens_total", "counter", "tokens", "Prompt tokens encoded."),
        Metric("detokenized_tokens_total", "counter", "tokens", "Output tokens decoded."),
        Metric("open_streams", "gauge", "samples", "Samples being decoded."),
        *(_routes(reason) for reason in REASONS),
        Metric("stop_strings_total", "counter", "samples", "Samples ended by a stop string."),
        Metric("tool_calls_total", "counter", "calls", "Calls of tools that were read in answers."),
        Metric("malformed_tool_calls_total", "counter", "calls", "What began as a call, was none, and stayed text."),
        Metric("reasoning_tokens_total", "counter", "tokens", "Output tokens of thinking."),
        *(_grammars(outcome) for outcome in ("compiled", "refused")),
        _histogram("grammar_compile_seconds", "Preparing a request whose answer has a form.", STEP_SECONDS),
        Metric("helper_jobs_total", "counter", "jobs", "Prompts and calls given to the helper processes."),
        Metric("helper_jobs_waiting", "gauge", "jobs", "Jobs that wait for a helper process."),
        Metric("helper_jobs_refused_total", "counter", "jobs", "Jobs refused because too many waited (429)."),
        Metric("helper_jobs_cancelled_total", "counter", "jobs", "Jobs that nobody waited for any more."),
    ),
    "scheduler": (
        Metric("num_requests_running", "gauge", "samples", "Samples in the batch."),
        Metric("num_requests_waiting", "gauge", "samples", "Samples waiting, those held back at the intake included."),
        *_by_adapter("adapter_requests_running", "Samples of an adapter in the batch."),
        *_by_adapter("adapter_requests_waiting", "Samples of an adapter that wait, or leave the batch."),
        Metric("kv_cache_usage_perc", "gauge", "ratio", "KV blocks in use by running samples, 0 to 1."),
        Metric("num_kv_blocks", "gauge", "blocks", "KV blocks in the arena."),
        Metric("num_free_kv_blocks", "gauge", "blocks", "KV blocks not used by a running sample (cached ones included)."),
        Metric("num_free_slots", "gauge", "slots", "Batch slots that no sample holds."),
        Metric("num_tokens_to_compute", "gauge", "tokens", "Prompt tokens of running and waiting samples to be computed."),
        Metric("num_cached_kv_blocks", "gauge", "blocks", "KV blocks that the prefix index holds."),
        Metric("prefix_cache_queries_total", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
        Metric("prefix_cache_hits_total", "counter", "tokens", "Prompt tokens found in the prefix cache."),
        Metric("mm_cache_queries_total", "counter", "units", "Units of pictures and video looked up in the encoder cache."),
        Metric("mm_cache_hits_total", "counter", "units", "Of these, units that were there or on their way."),
        Metric("encoder_calls_total", "counter", "calls", "Calls of the vision encoder begun."),
        Metric("encoder_units_total", "counter", "units", "Units in these calls."),
        Metric("encoder_rows_total", "counter", "rows", "Rows of features in these calls."),
        Metric("encoder_losses_total", "counter", "units", "Units whose pixels or features a rank lacked: encoded again."),
        Metric("encoder_evictions_total", "counter", "units", "Units that went from the encoder cache for want of room."),
        Metric("encoder_cache_usage_perc", "gauge", "ratio", "Rows of the encoder arena that hold features, 0 to 1."),
        Metric("num_encoder_cache_units", "gauge", "units", "Units in the encoder cache."),
        Metric("spec_decode_num_drafts_total", "counter", "rows", "Rows with drafts."),
        Metric("spec_decode_num_draft_tokens_total", "counter", "tokens", "Drafts that were verified."),
        Metric("spec_decode_num_accepted_tokens_total", "counter", "tokens", "Drafts that stood."),
        *_by_position("spec_decode_num_draft_tokens_per_pos_total", "Drafts that were verified."),
        *_by_position("spec_decode_num_accepted_tokens_per_pos_total", "Drafts that stood."),
        *_by_position("spec_decode_num_emitted_tokens_per_pos_total", "Drafts that stood before the end of their answer."),
        Metric("spec_decode_num_rows_total", "counter", "rows", "Rows that gave tokens, with drafts or without."),
        Metric("spec_decode_num_resting", "gauge", "rows", "Such rows of the last step that had no drafts."),
        Metric("num_preemptions_total", "counter", "samples", "Samples put back to waiting for want of blocks."),
        Metric("requests_aborted_total", "counter", "samples", "Samples aborted before their end."),
        Metric("requests_rejected_total", "counter", "samples", "Samples refused (full queue, never fitting)."),
        Metric("slow_streams", "gauge", "samples", "Samples held back because their reader is slow."),
        Metric("engine_weight_version", "gauge", "version", "Version of the weights in use; 0 while cleared."),
        Metric("engine_state", "gauge", "state", "0 normal, 1 paused, 2 cleared, 3 loading."),
        Metric("is_record_unwritten", "gauge", "runs", "1 while weights.json cannot be written; nothing runs before it is."),
        Metric("steps_total", "counter", "steps", "Steps whose results are back."),
        Metric("steps_dispatched_again_total", "counter", "steps", "Steps lost with a worker and dispatched again."),
        Metric("scheduled_tokens_total", "counter", "tokens", "Tokens computed, prefill and decode."),
        _histogram("iteration_tokens_total", "Tokens of a step.", TOKENS, "tokens"),
        _histogram("request_queue_time_seconds", "From arrival to the first time a sample is scheduled."),
        _histogram("request_prefill_time_seconds", "From first scheduled to first token."),
        _histogram("request_decode_time_seconds", "From first token to the end."),
        _histogram("request_inference_time_seconds", "From first scheduled to the end."),
        _histogram("step_schedule_seconds", "Choosing and encoding a step.", STEP_SECONDS),
        _histogram("step_dispatch_seconds", "From the dispatch of a step to its start on the rank.", STEP_SECONDS),
        _histogram("step_run_seconds", "Model time of a step on the rank.", STEP_SECONDS),
        _histogram("step_sample_seconds", "Sampling time of a step on the rank.", STEP_SECONDS),
        _histogram("step_return_seconds", "From the end of sampling to the handled result.", STEP_SECONDS),
    ),
    "cache": (
        Metric("kv_events_total", "counter", "events", "KV events published."),
        Metric("kv_arena_bytes", "gauge", "bytes", "Size of the KV arena."),
        Metric("kv_arena_reserved_bytes", "gauge", "bytes", "How much of it has its memory for certain."),
    ),
    "worker": (
        Metric("worker_steps_total", "counter", "steps", "Steps run."),
        Metric("worker_step", "gauge", "step", "The step that it began last."),
        Metric("worker_tokens_total", "counter", "tokens", "Tokens computed."),
        Metric("constrained_tokens_total", "counter", "tokens", "Tokens drawn where a grammar or a bound of thinking was set."),
        Metric("constraint_wait_seconds_total", "counter", "seconds", "Time in which steps waited for the masks of grammars."),
        Metric("constraint_failures_total", "counter", "samples", "Samples that ended at a limit of their grammar."),
        Metric("worker_busy_seconds_total", "counter", "seconds", "Time in steps."),
        Metric("encoder_seconds_total", "counter", "seconds", "Of these, time in layers of the vision encoder."),
        Metric("worker_idle_seconds_total", "counter", "seconds", "Time between steps while requests ran."),
        Metric("rank_group_epoch", "gauge", "epoch", "Epoch of its rank group that this rank joined last; 0: it has no peers."),
        Metric("collectives_total", "counter", "calls", "Collectives that this rank came to, gathers of its steps included."),
        Metric("collective_wait_seconds_total", "counter", "seconds", "Time in which it waited for its peers there."),
        Metric(
            "rank_group_steps_total", "counter", "steps", "Steps of the rank group that shares experts which this rank ran."
        ),
        Metric("empty_rank_group_steps_total", "counter", "steps", "Those in which it had no rows of its own."),
        Metric("eplb_rebalances_total", "counter", "rebalances", "Placements of experts that this rank put in force."),
        Metric("eplb_moved_experts_total", "counter", "experts", "Experts that lay elsewhere before, of all layers."),
        Metric("eplb_predicted_imbalance", "gauge", "ratio", "Rows of the busiest rank over the mean, as then foreseen."),
        Metric("weights_bytes", "gauge", "bytes", "Size of the weights in use, as they are kept."),
        Metric("rank_weight_version", "gauge", "version", "Version of the weights this rank holds; 0 while cleared."),
        Metric("uncaptured_step_sizes", "gauge", "sizes", "Captured sizes that are run op by op: capturing them failed."),
        Metric("captured_step_sizes", "gauge", "sizes", "Sizes of steps that were captured."),
        _histogram("captured_step_rows", "Rows of steps that were replayed as captured, padding included.", TOKENS, "rows"),
        _histogram("eager_step_rows", "Rows of steps that were run op by op, where some could be captured.", TOKENS, "rows"),
        *(_copies(end) for end in ("device", "host")),
        Metric("device_wait_seconds_total", "counter", "seconds", "Time in which results of the device were waited for."),
        Metric("device_memory_bytes", "gauge", "bytes", "Memory of the rank's tensors on its device, when it had loaded."),
        Metric("device_has_graphs", "gauge", "", "1: what the device captured is replayed there."),
        Metric("device_keeps_cache", "gauge", "", "1: what the KV cache holds outlives this process."),
        *(_multiplies(dtype) for dtype in DEVICE_DTYPES),
        *_op_fallbacks(),
        Metric("weights_load_seconds", "gauge", "seconds", "Time the last load took."),
        *(_cache_loads(found) for found in WEIGHT_CACHE_OUTCOMES),
        Metric("spec_decode_draft_seconds_total", "counter", "seconds", "Time in which drafts were made."),
        *_by_method("spec_decode_num_draft_tokens_by_method_total", "Drafts that were verified."),
        *_by_method("spec_decode_num_accepted_tokens_by_method_total", "Drafts that stood."),
        Metric("spec_decode_index_bytes", "gauge", "bytes", "What drafts are made of, besides the slots' tokens."),
    ),
}


def metrics_of(role: str) -> tuple[Metric, ...]:
    """The rows that an actor of `role` writes."""
    return EVERY_ROLE + BY_ROLE[role]
