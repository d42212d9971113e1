"""The engine's configuration: one frozen value, built once from the command line, the environment and a file.

The supervisor builds it and writes it to the run's manifest, where every actor reads it. Nothing else reads `os.environ` or
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from engine.dense_module import DenseModule
from engine.kv_groups import KvGroup, longest_sequence, num_moving

DRAFT_METHODS = ("ngram", "suffix", "mtp")  # tried in this order, the cheapest first
MAX_DRAFTS = 16  # per row
MAX_LOGPROBS = 128  # limit of --max-logprobs
STATES_PER_SEQUENCE = 3  # slots: the confirmed recurrent state, and those that two steps in flight write
MAX_REPLICAS = 64  # of an engine, and places for those of a router's engines
MAX_LORAS, MAX_LORA_RANK = 64, 512  # limits of adapters loaded at a time, and of an adapter's rank
SUFFIX_SHARED_BYTES = 64 << 20  # size of the shared tree of completed answers
_SUFFIX_BYTES, _NGRAM_BYTES = 256, 16  # bytes in a slot's index for each of its tokens; for n-grams, of each length


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding, as `--speculative-config` names it. No method: no drafts."""

    method: str = ""  # "ngram", "suffix" or "mtp", or several with commas: the most promising one is used for each row
    num_speculative_tokens: int = 3  # most draft tokens of a row
    prompt_lookup_min: int = 2  # tokens that must match before their continuation is drafted
    prompt_lookup_max: int = 8
    suffix_decoding_max_tree_depth: int = 24  # tokens of a match and its drafts together
    suffix_decoding_max_cached_requests: int = 10000  # remembered answers
    suffix_decoding_max_spec_factor: float = 1.0  # draft tokens for each matched token
    suffix_decoding_min_token_prob: float = 0.1  # lower limit for how often a token followed there
    adaptive: bool = True  # fewer drafts where few are accepted

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.method.split(",")) if self.method else ()

    @property
    def index_bytes(self) -> tuple[int, int]:
        """Return the bytes that drafters use besides the KV cache: for all slots, and at most for each token of a slot. A
        cached prefix counts in each slot that uses it."""
        num_ngrams = (self.prompt_lookup_max - self.prompt_lookup_min + 1) * ("ngram" in self.methods)
        has_trees = "suffix" in self.methods
        return SUFFIX_SHARED_BYTES * has_trees, _NGRAM_BYTES * num_ngrams + _SUFFIX_BYTES * has_trees

    @property
    def has_mtp(self) -> bool:
        """Whether layers of the checkpoint draft."""
        return "mtp" in self.methods

    @property
    def num_overlap(self) -> int:
        """Positions that are computed again, to the same bits, when a sequence continues from the cache: draft layers need the
        hidden state before the next token."""
        return int(self.has_mtp)

    @property
    def max_drafts(self) -> int:
        return self.num_speculative_tokens if self.method else 0

    @property
    def num_logged(self) -> int:
        """Rows behind a recurrent state that the next step may replay."""
        return self.max_drafts + self.num_overlap


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Output of an engine that pools: one vector per prompt, or scores of classes."""

    task: Literal["embed", "classify"]
    kind: Literal["last", "mean", "cls"] = "last"  # hidden states that are pooled: of the last token, of all, of the first
    num_values: int  # size of the vector, or number of scores
    is_normalized: bool = False  # vectors are scaled to length 1
    activation: Literal["none", "sigmoid", "softmax"] = "none"  # of scores
    class_token_ids: tuple[int, ...] = ()  # no and yes: the score is the difference of their logits; only yes: its logit
    is_whole: bool = False  # each prompt is computed in one step: its tokens see all of it
    dense: tuple[DenseModule, ...] = ()  # of vectors, before they are normalized
    dimensions: tuple[int, ...] = ()  # allowed sizes of shortened vectors; none: any
    max_tokens: int = 0  # tokens of a prompt, set by the model's authors; 0: as many as the model takes

    @property
    def needs_all_tokens(self) -> bool:
        """Whether no part of a prompt may come from the cache."""
        return self.kind != "last"


class LoraModule(msgspec.Struct, frozen=True):
    """An adapter that is loaded at start: the name under which it is served, and its directory."""

    name: str
    path: str


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Balancing of experts among ranks, as `--eplb-config` names it."""

    num_redundant_experts: int = 0  # additional expert slots per layer
    window_size: int = 1000  # most steps of the rank group that are evaluated
    step_interval: int = 3000  # least steps of the rank group between two rebalances
    check_interval_s: float = 1.0  # interval between looks at the counts
    statistics_interval_s: float = 10.0  # longest time that is evaluated
    min_gain: float = 0.05  # least reduction of a layer's max/mean


def text_of_kernels(variants: Mapping[str, str]) -> str:
    """Return the variant of each part as text, such as `avx512` or `avx512bf16; amx: int8, attention`."""
    base = variants.get("base", "")
    others: dict[str, list[str]] = {}
    for part, variant in variants.items():
        if variant != base:
            others.setdefault(variant, []).append(part)
    return "; ".join([base, *(f"{variant}: {', '.join(parts)}" for variant, parts in others.items())])


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every option, resolved: no value that actors see is None or "auto"."""

    # model
    model: str  # absolute path of a checkpoint directory
    served_model_name: tuple[str, ...]  # answers carry the first one
    dtype: str  # "float32" | "bfloat16": of weights that are not integers
    quantization: str  # "none" | "wint8" | "wint4"
    quantization_group_size: int = 0  # inputs with one scale; 0: the default of the quantization
    quantization_calibration: str = ""  # file of statistics; empty: none
    calibration_digest: str = ""  # of the contents of this file when the engine started
    max_model_len: int
    load_format: str  # "safetensors" | "dummy"
    pooling: PoolingConfig | None = None  # None: the engine generates
    weight_cache_dir: str  # directory of packed weights; empty: they are not kept
    weight_cache_limit: int  # bytes of all files in it
    chat_template: str  # template text that replaces the model's; empty: the model's own
    trust_request_chat_template: bool  # requests may bring their own template
    tool_call_parser: str = "none"  # name of a family of `engine/parsers`
    reasoning_parser: str = "none"
    shows_tools: bool = True  # by the chat template
    plugins: tuple[str, ...] = ()  # loaded by every process
    enable_auto_tool_choice: bool = True  # look for tool calls also if a request does not require one
    default_chat_template_kwargs: dict[str, Any] = {}  # variables of the template, unless a request sets them
    seed: int

    # LoRA adapters
    max_loras: int = 0  # slots; 0: adapters are disabled
    max_lora_rank: int = 0
    lora_modules: tuple[LoraModule, ...] = ()
    adapter_bytes: int = 0  # size of the arena for all adapters
    adapter_expert_bytes: int = 0  # of these, for experts: memory is taken when an adapter of experts is loaded

    # batches and cache
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int  # in all layers
    kv_groups: tuple[KvGroup, ...] = (KvGroup(),)  # of layers with the same reach
    kv_cache_dtype: str  # "float32" | "bfloat16" | "int8"
    kv_cache_bytes: int  # size of the arena: num_kv_blocks blocks
    num_states: int = 0  # slots of recurrent states; 0: the model has no recurrent layers
    state_bytes: int = 0  # size of the arena: these slots, and slot 0
    state_cache_interval: int = 0  # tokens between kept states of a prompt; 0: no state is kept for later requests
    enable_prefix_caching: bool
    max_waiting: int
    max_logprobs: int  # most log-probabilities per position that a request may ask for
    max_grammar_bytes: int  # limit for a request's structured-output text
    request_timeout_s: float  # 0: none; a request may set its own `timeout`
    request_priority: bool  # requests may set a `priority`
    max_priority_wait_s: float  # a request never goes before one that arrived this much earlier

    max_step_time_ms: float = 100.0  # limit for a step with prompts and running streams; 0: only tokens limit it
    # prompts with more tokens left to compute are long; 0: those that do not fit one step
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0  # prompts that are computed in chunks at a time; 0: no limit
    max_long_partial_prefills: int = 1  # long ones among them, per source

    # processes
    device: str
    threads: int  # per rank
    memory_nodes: tuple[tuple[int, ...], ...] = ()  # cores of each node that ranks are bound to; none: not bound
    ops: str  # "native" | "reference" | "fused" | "cuda"
    allow_variant_ops: bool = False  # use a fused op that depends on the batch if no batch-independent one exists
    plan: str  # "tape" | "captured" | "eager"
    cpu_kernels: dict[str, str]  # for native ops: variant of each part ("base": the rest); missing parts: as built
    tensor_parallel_size: int = 1  # ranks of a replica
    data_parallel_size: int = 1  # replicas: schedulers, each with its ranks, its cache actor and its KV arena
    data_parallel_routing: str = "prefix"  # "prefix" | "load" | "round-robin"
    enable_expert_parallel: bool = False  # all ranks share the experts of all replicas
    expert_placement_strategy: str = "linear"  # "linear" | "round_robin": initial placement of experts
    ep_batched_token_timeout_ms: int = 100  # how long new requests are held to fill a step together, if ranks share experts
    ep_mixed_steps: bool = True  # with shared experts, a step may have prefill and decode
    num_max_dispatch_tokens_per_rank: int = 0  # rows of the windows for the exchange of experts' inputs, allocated at start
    enable_eplb: bool = False  # experts move between ranks according to their load
    eplb_config: EplbConfig = EplbConfig()
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    # numbers of rows for which steps are captured, largest first; none: no capture
    cudagraph_capture_sizes: tuple[int, ...] = ()
    max_cudagraph_capture_size: int = 0
    graph_only_prefill: bool = False  # capture prefill steps instead of decode steps
    group_ports: tuple[int, ...] = ()  # loopback ports held by the supervisor, for the process groups of reference ops
    is_cache_estimated: bool = False  # num_kv_blocks is an estimate for a device, which its worker checks
    # driver library that keeps KV arenas on devices across worker restarts; "": they end with the worker
    device_arena_library: str = ""
    comm_bytes: int = 0  # size of the comm arena of a replica, or of all that share experts; 0: single rank
    api_processes: int
    tokenizer_processes: int
    restart_limit: int  # deaths of an actor within restart_window_s that stop the engine
    restart_window_s: float
    hang_timeout_s: float
    load_timeout_s: float
    stop_timeout_s: float

    # images and video, vision models only
    media_processes: int = 0  # 0: the model takes only text, or media is disabled
    media_memory: int = 256 << 20  # bytes of fetched media per HTTP process
    mm_processor_cache_gb: float = 0.25  # GiB of pixels per media process
    encoder_cache_size: int = 0  # rows of each replica's encoder arena: tokens
    encoder_row_width: int = 0  # values per row
    max_image_pixels: int = 89_000_000
    max_media_bytes: int = 32 << 20  # of an image; a video may have twice as many
    limit_mm_per_prompt: dict[str, int] = {}  # of each modality
    mm_processor_kwargs: dict[str, Any] = {}  # override the checkpoint's processor files
    media_io_kwargs: dict[str, Any] = {}  # by modality: how files are read
    language_model_only: bool = False
    vision_quantization: str = "none"  # "none" | "wint8": of the encoder's weights
    enable_mm_embeds: bool = True  # requests may send features that they encoded themselves
    media_download_parallel: int = 8  # links of one request fetched at a time
    media_fetch_timeout_s: float = 10.0  # of a link; three times as long for a video
    allowed_media_domains: tuple[str, ...] = ()  # hosts of links; empty: all public ones
    allowed_media_networks: tuple[str, ...] = ()  # private networks that links may lead to
    allowed_local_media_path: str = ""  # directory for `file:` links; empty: disabled
    object_store_endpoint: str = ""  # URL for s3: and bos: links; empty: the scheme's own
    object_store_region: str = ""  # empty: the scheme's default
    object_store_access_key: str = ""  # signs such links; empty: disabled
    object_store_secret_key: str = ""
    object_store_session_token: str = ""
    allowed_object_buckets: tuple[str, ...] = ()  # buckets that links may name, with a key prefix; "*": all
    encoder_depth: int = 0  # layers of the vision encoder
    encoder_passes: int = 0  # passes over the rows of its units
    encoder_whole_layers: tuple[int, ...] = ()  # layers with attention over the whole image
    encoder_attention_cost: float = 0.0  # of such a layer, per square of a unit's rows, in the units of `encoder_cost.py`
    max_num_batched_encoder_embeds: int = 0  # rows of features for which a step may run the matrices of all layers
    disable_chunked_mm_input: bool = False  # no chunk ends inside an image
    mm_chunk_tokens: int = 0  # target size of chunks of prompts with media; 0: max_num_batched_tokens

    # cluster
    cluster_listen: str = ""  # host:port at which routers reach this engine; empty: none
    cluster_key_file: str = ""  # empty: connections are neither encrypted nor authenticated
    cluster_checkpoints: tuple[str, ...] = ()  # directories with weights and adapters that a router's orders may load
    max_engines: int = 0  # places of a router: replicas of its engines together; 0: this is an engine
    engines: str = ""  # path of the file with the addresses of a router's engines
    namespace: str = ""  # of all engines of a router (`engine/cluster/namespace.py`)
    namespace_facts: str = ""  # what it is made of, as text
    namespace_without_kernels: str = ""
    allow_mixed_kernels: bool = False  # engines of a router may differ in their kernels
    peer_silence_s: float = 1.0  # without a message, after which an engine gets no new requests
    peer_timeout_s: float = 3.0  # without a message, after which an engine counts as dead
    drain_timeout_s: float = 300.0  # that streams of an engine which left the list may continue there

    # HTTP
    host: str
    port: int
    api_key: tuple[str, ...]  # digests (`engine/keys.py`), as in the next two
    api_key_priority: tuple[tuple[str, int], ...]  # keys with their own priority, the best that their requests get
    admin_key: str
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_body_bytes: int
    max_files_size: int  # bytes of all uploaded files and answers of batches
    max_files_size_per_user: int
    max_connections: int
    max_connections_per_address: int = 0  # 0: an address may take all but a few
    trusted_proxies: tuple[str, ...] = ()  # networks of proxies that report the client's address
    uds: str  # path of the UNIX socket that replaces host and port; empty: none
    root_path: str  # path prefix under which a proxy serves this server, such as "/llm"; empty: none
    ssl_keyfile: str
    ssl_certfile: str  # certificate for TLS; empty: plain HTTP
    sse_keep_alive_interval_s: float  # idle time of a stream after which a comment is sent; 0: never

    # run
    run_id: str
    run_dir: str
    print_client: str  # client with settings printed at start; "none": no settings are printed
    kv_events_endpoint: str  # ZeroMQ endpoint of the KV events; empty: ipc:// in the run directory
    log_level: str
    log_format: str = "text"  # "text" | "json"
    log_requests: bool = False  # ids, lengths and parameters, never text
    otlp_traces_endpoint: str = ""  # URL that receives spans of requests; empty: no tracing
    metrics_prefix: str = "tokamak"  # of the names in /metrics
    trace: bool = False  # keep the last events of every actor

    @property
    def has_cache_on_host(self) -> bool:
        """Whether the KV arena holds keys and values; otherwise only block marks."""
        return self.device == "cpu"

    @property
    def is_router(self) -> bool:
        """Whether this is a router: engines elsewhere have the model."""
        return self.max_engines > 0

    @property
    def has_link(self) -> bool:
        """Whether an actor talks to other machines: to the engines of a router, or to the routers of an engine."""
        return self.is_router or bool(self.cluster_listen)

    @property
    def num_replicas(self) -> int:
        """Replicas between which tokenizers choose: an engine's own, or the places of a router."""
        return self.max_engines or self.data_parallel_size

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def are_rank_groups_whole(self) -> bool:
        """Whether ranks exchange tensors in Paddle process groups. Such a group ends when one of its ranks dies. Others use
        shared memory, of the host or of their cards."""
        return self.ops not in ("native", "cuda")

    @property
    def num_groups(self) -> int:
        """Paddle process groups: one per replica, and one for all ranks that share experts."""
        if not self.are_rank_groups_whole:
            return 0
        return (self.data_parallel_size if self.tensor_parallel_size > 1 else 0) + self.enable_expert_parallel

    @property
    def num_redundant_experts(self) -> int:
        """Redundant experts of a layer."""
        return self.eplb_config.num_redundant_experts if self.enable_eplb else 0

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and answer: limited by the model and by the whole KV cache."""
        return longest_sequence(self.kv_groups, self.num_kv_pages, self.block_size, self.num_moving, self.max_model_len)

    @property
    def num_kv_pages(self) -> int:
        """Pages of the KV cache: a block in all layers has one for each block table."""
        return self.num_kv_blocks * sum(group.num_tables for group in self.kv_groups)

    @property
    def num_moving(self) -> int:
        """Positions of a sequence between the first that may be computed again and the last that is dispatched."""
        return num_moving(self.max_num_batched_tokens, self.speculative_config.num_overlap)

    @property
    def kernels_text(self) -> str:
        """The variants of the kernels."""
        return text_of_kernels(self.cpu_kernels)

    @property
    def url(self) -> str:
        """Address at which programs on this machine reach the engine over HTTP."""
        return self.url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    def url_of(self, host: str) -> str:
        """Return `http://host:port`, with brackets around an IPv6 address, or `unix:PATH` for a UNIX socket."""
        if self.uds:
            return f"unix:{self.uds}"
        name = f"[{host}]" if ":" in host else host
        return f"{'https' if self.ssl_certfile else 'http'}://{name}:{self.port}"
