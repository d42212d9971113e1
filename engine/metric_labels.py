"""Values of metric labels, for `engine/metrics.py` and for the code that writes the metrics."""

from __future__ import annotations

from typing import Literal, get_args

HTTP_STATUSES = ("2xx", "4xx", "5xx")
HTTP_ROUTES = (  # timed separately; a path belongs to the first one that it begins with
    "/v1/chat/completions/render",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages/count_tokens",
    "/v1/messages",
    "/v1/responses/input_tokens",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/score",
    "/pooling",
    "/classify",
    "/v1/files",
    "/v1/batches",
    "/v1/models",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api",
    "/tokenize",
    "/detokenize",
    "/metrics",
    "/health",
    "/dashboard",
    "/admin",
)
OTHER_ROUTE = "other"
EngineState = Literal["ready", "quiet", "leaving", "gone"]
ENGINE_STATES: tuple[EngineState, ...] = get_args(EngineState)  # of a router
RESUBMISSION_CAUSES = (
    "tokenizer",  # died
    "scheduler",  # died, here or on an engine of a router
    "connection",  # to an engine was closed
    "silence",  # of an engine
    "drain",  # of an engine that left the list took too long
    "weights",  # are about to be reloaded there
    "session",  # was ended by an engine, for example because its weights have changed
    "link",  # of the router died
    "no engine",  # was connected
)
REPLICA_GAUGES = (  # of a scheduler, which an engine reports to routers (`Load` in engine/cluster/frames.py)
    "engine_state",
    "num_requests_running",
    "num_requests_waiting",
    "num_tokens_to_compute",
    "num_free_slots",
    "num_kv_blocks",
    "num_free_kv_blocks",
    "num_cached_kv_blocks",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)
WEIGHT_CACHE_OUTCOMES = ("held", "hit", "miss", "damaged")
DEVICE_DTYPES = ("float32", "float16", "bfloat16")
ROW_CANDIDATES = {"all": ("cuda",), "draw": ("sample",)}  # CUDA variants, used where their results are right
OP_CANDIDATES = {  # as in ops/paddle/fused.py, by what is checked
    "linear": ("tiles_of_512", "tiles_of_128", "reference"),
    "rms_norm": ("fused_rms_norm", "reference"),
    "rotary": ("fused_rotary_position_embedding", "reference"),
    "activation": ("swiglu", "reference"),
    "draw": ("largest", "host"),
}
