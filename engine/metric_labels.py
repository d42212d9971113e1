"""Values of metric labels, for `engine/metrics.py` and for the code that writes the metrics."""

from __future__ import annotations

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
