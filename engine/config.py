"""The engine's configuration: one frozen value, made once from the command line, the environment and a file.

The supervisor makes it, writes it to the run's manifest, and every actor reads it from there; nothing else looks at
`os.environ` or at arguments.
"""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every option, resolved: nothing is None or "auto" any more when actors see it."""

    # model
    model: str  # absolute path of a checkpoint directory
    served_model_name: tuple[str, ...]  # the first is the one that answers carry
    dtype: str = "float32"  # "float32" | "bfloat16": of weights that are no integers
    quantization: str = "none"  # "none" | "wint8" | "wint4"
    max_model_len: int
    load_format: str = "safetensors"  # "safetensors" | "dummy"
    weight_cache_dir: str = ""  # where packed weights are kept; empty: they are not
    weight_cache_limit: int = 20 << 30  # bytes of all files there
    chat_template: str = ""  # template text that replaces the model's; empty: the model's
    seed: int = 0

    # batches and cache
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_kv_blocks: int
    kv_cache_dtype: str = "float32"  # "float32" | "bfloat16" | "int8"
    kv_cache_bytes: int  # size of the arena: num_kv_blocks blocks
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    request_timeout_s: float = 0.0  # 0: none; a request may set its own `timeout`

    # processes
    device: str = "cpu"
    threads: int = 1  # per rank
    ops: str = "native"  # "native" | "reference"
    plan: str = "tape"  # "tape" | "eager"
    num_ranks: int = 1
    api_processes: int = 1
    tokenizer_processes: int = 1
    restart_limit: int = 3  # deaths of one actor within restart_window_s that end the engine
    restart_window_s: float = 300.0
    hang_timeout_s: float = 60.0
    load_timeout_s: float = 1800.0
    stop_timeout_s: float = 10.0

    # HTTP
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    admin_key: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_connections: int = 1024

    # run
    run_id: str
    run_dir: str
    kv_events_endpoint: str = ""  # ZeroMQ endpoint of the KV events; empty: ipc:// in the run directory
    log_level: str = "info"

    @property
    def url(self) -> str:
        """Where programs on this machine reach the engine over HTTP."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return http_url(host, self.port)


def http_url(host: str, port: int) -> str:
    """`http://host:port`, an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
