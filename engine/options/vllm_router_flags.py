"""Handling of each flag of vLLM's router (`vllm-router`) by `tokamak router`, as `vllm_flags.py` has it for `vllm serve`.

Data, read by `vllm.py` and `router.py`. A flag that is not listed has the same name and meaning as ours.
"""

from __future__ import annotations

from engine.options.vllm_flags import Fate

_LIST = "engines are named in a file, one host:port a line (the --cluster-listen of each); use --engines FILE"
_NAMES = "use --engines dns:NAME:PORT with the name of a headless service"
_SPLIT = "each engine computes prompts and answers; moving a KV cache between engines is not supported"
_WATCH = "engines and routers exchange heartbeats; see --peer-silence and --peer-timeout"
_RETRIES = "streams of a lost engine always continue on another one"
_COST = "the choice weighs what each engine has cached and what it has to compute; nothing is to be set"
_METRICS = "/metrics is served at --host and --port"
_QUEUE = "use --max-waiting, which limits waiting sequences per client"


def _refused(text: str, *, is_flag: bool = False, takes_several: bool = False) -> Fate:
    return Fate("refused", text, is_flag, (), takes_several)


ROUTER_FLAGS: dict[str, Fate] = {
    "worker_urls": _refused(_LIST, takes_several=True),
    "policy": Fate("alias", "data_parallel_routing"),
    "cors_allowed_origins": Fate("alias", "allowed_origins", takes_several=True),
    "request_timeout_secs": Fate("alias", "request_timeout"),
    "max_payload_size": Fate("alias", "max_body_bytes"),
    "log_dir": _refused("logs are in the run directory; use --run-dir"),
    "service_discovery": _refused(_NAMES, is_flag=True),
    "selector": _refused(_NAMES, takes_several=True),
    **dict.fromkeys(("service_discovery_port", "service_discovery_namespace"), _refused(_NAMES)),
    **dict.fromkeys(("vllm_pd_disaggregation", "mini_lb"), _refused(_SPLIT, is_flag=True)),
    **dict.fromkeys(("prefill", "prefill_selector", "decode_selector"), _refused(_SPLIT, takes_several=True)),
    **dict.fromkeys(("decode", "prefill_policy", "decode_policy", "vllm_discovery_address", "kv_connector"), _refused(_SPLIT)),
    "enable_igw": _refused("a router serves one model; start one for each", is_flag=True),
    "intra_node_data_parallel_size": Fate("none", "each replica of an engine is known; see --max-engines"),
    **dict.fromkeys(
        ("worker_startup_timeout_secs", "worker_startup_check_interval"), Fate("none", "engines may start at any time")
    ),
    **dict.fromkeys(
        (
            "cache_threshold",
            "balance_abs_threshold",
            "balance_rel_threshold",
            "eviction_interval_secs",
            "max_tree_size",
        ),
        Fate("none", _COST),
    ),
    **dict.fromkeys(("prometheus_port", "prometheus_host"), Fate("none", _METRICS)),
    "request_id_headers": _refused("the id of a request is its header x-request-id", takes_several=True),
    **dict.fromkeys(
        ("max_concurrent_requests", "queue_size", "queue_timeout_secs", "rate_limit_tokens_per_second"), _refused(_QUEUE)
    ),
    **dict.fromkeys(
        (
            "retry_max_retries",
            "retry_initial_backoff_ms",
            "retry_max_backoff_ms",
            "retry_backoff_multiplier",
            "retry_jitter_factor",
        ),
        Fate("none", _RETRIES),
    ),
    "disable_retries": _refused(_RETRIES, is_flag=True),
    **dict.fromkeys(
        (
            "cb_failure_threshold",
            "cb_success_threshold",
            "cb_timeout_duration_secs",
            "cb_window_duration_secs",
            "health_failure_threshold",
            "health_success_threshold",
            "health_check_timeout_secs",
            "health_check_interval_secs",
            "health_check_endpoint",
        ),
        Fate("none", _WATCH),
    ),
    "disable_circuit_breaker": Fate("none", _WATCH, is_flag=True),
}

ROUTER_VALUES: dict[str, dict[str, tuple[str, str]]] = {  # flag -> its value -> that of our option, and a note
    "policy": {
        "cache_aware": ("prefix", ""),
        "round_robin": ("round-robin", ""),
        "power_of_two": ("load", "the load of all engines is compared, not of two"),
        "random": ("round-robin", "engines are used in turn, not at random"),
        **dict.fromkeys(
            ("consistent_hash", "sticky_round_robin"),
            ("prefix", "a conversation returns to the engine that has it cached"),
        ),
    }
}
