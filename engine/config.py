"""The engine's configuration: one frozen value, made once from the command line, the environment and a file.

The supervisor makes it, writes it to the run's manifest, and every actor reads it from there; nothing else looks at
`os.environ` or at arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

DRAFT_METHODS = ("ngram", "suffix", "mtp")  # in the order in which they are asked: those that cost least first
MAX_DRAFTS = 16  # of a row
MAX_LOGPROBS = 128  # that --max-logprobs may allow
MAX_LORAS, MAX_LORA_RANK = 64, 512  # adapters that an engine may have at a time, and the largest rank of one
SUFFIX_SHARED_BYTES = 64 << 20  # of the tree of answers that are complete
_SUFFIX_BYTES, _NGRAM_BYTES = 256, 16  # of a slot's index, of each of its tokens; n-grams of each length


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafting, as `--speculative-config` names it. No method: no drafts."""

    method: str = ""  # "ngram", "suffix" or "mtp"; a list of methods with commas: for each row the one that promises most
    num_speculative_tokens: int = 3  # drafts of a row, at most
    prompt_lookup_min: int = 2  # tokens that must have stood before what is guessed to come again
    prompt_lookup_max: int = 8
    suffix_decoding_max_tree_depth: int = 24  # tokens of a match and its drafts
    suffix_decoding_max_cached_requests: int = 10000  # answers that are remembered
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token that matched
    suffix_decoding_min_token_prob: float = 0.1  # by how often they followed there
    adaptive: bool = True  # fewer drafts where they do not stand

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.method.split(",")) if self.method else ()

    @property
    def index_bytes(self) -> tuple[int, int]:
        """Bytes that drafters remember besides the KV cache: for all slots, and for each of their tokens at most. A cached
        prefix counts in each slot that has it."""
        num_ngrams = (self.prompt_lookup_max - self.prompt_lookup_min + 1) * ("ngram" in self.methods)
        has_trees = "suffix" in self.methods
        return SUFFIX_SHARED_BYTES * has_trees, _NGRAM_BYTES * num_ngrams + _SUFFIX_BYTES * has_trees

    @property
    def has_mtp(self) -> bool:
        """Layers of the checkpoint draft."""
        return "mtp" in self.methods

    @property
    def num_overlap(self) -> int:
        """Positions that are computed once more, to the same bits, where a sequence goes on with what is in the cache: layers
        that draft need the hidden state before the next token."""
        return int(self.has_mtp)

    @property
    def max_drafts(self) -> int:
        return self.num_speculative_tokens if self.method else 0


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Output of an engine that pools: one vector of a prompt, or the scores of its classes."""

    task: Literal["embed", "classify"]
    kind: Literal["last", "mean", "cls"] = "last"  # of which hidden states: the last token's, all of them, the first one's
    num_values: int  # of a vector, or scores
    is_normalized: bool = False  # vectors have length 1
    activation: Literal["none", "sigmoid", "softmax"] = "none"  # of scores
    class_token_ids: tuple[int, ...] = ()  # no and yes: the score is what their logits differ by; yes alone: its logit
    is_whole: bool = False  # each prompt is computed in one step: its tokens see all of it
    dimensions: tuple[int, ...] = ()  # that vectors may be cut to; none: any
    max_tokens: int = 0  # of a prompt, as its authors had it; 0: as many as the model takes

    @property
    def needs_all_tokens(self) -> bool:
        """No beginning of a prompt may come from the cache."""
        return self.kind != "last"


class LoraModule(msgspec.Struct, frozen=True):
    """An adapter that the engine has from the start: the name of the model that it makes, and its directory."""

    name: str
    path: str


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Balancing of experts among ranks, as `--eplb-config` names it."""

    num_redundant_experts: int = 0  # of a layer: slots besides one for each expert
    window_size: int = 1000  # steps of the rank group that are looked back at, at most
    step_interval: int = 3000  # steps of the rank group between two rearrangements, at least
    check_interval_s: float = 1.0  # between looks at the counts
    statistics_interval_s: float = 10.0  # that are looked back at, at most
    min_gain: float = 0.05  # by which a layer's max/mean must fall


def text_of_kernels(variants: Mapping[str, str]) -> str:
    """Return the variant of each part as text: `avx512`, or `avx512bf16; amx: int8, attention`."""
    base = variants.get("base", "")
    others: dict[str, list[str]] = {}
    for part, variant in variants.items():
        if variant != base:
            others.setdefault(variant, []).append(part)
    return "; ".join([base, *(f"{variant}: {', '.join(parts)}" for variant, parts in others.items())])


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every option, resolved: nothing is None or "auto" any more when actors see it."""

    # model
    model: str  # absolute path of a checkpoint directory
    served_model_name: tuple[str, ...]  # the first is the one that answers carry
    dtype: str  # "float32" | "bfloat16": of weights that are no integers
    quantization: str  # "none" | "wint8" | "wint4"
    max_model_len: int
    load_format: str  # "safetensors" | "dummy"
    pooling: PoolingConfig | None = None  # None: the engine generates
    weight_cache_dir: str  # where packed weights are kept; empty: they are not
    weight_cache_limit: int  # bytes of all files there
    chat_template: str  # template text that replaces the model's; empty: the model's
    trust_request_chat_template: bool  # whether requests may bring a template of their own
    tool_call_parser: str = "none"  # name of a family of `engine/parsers`
    reasoning_parser: str = "none"
    enable_auto_tool_choice: bool = True  # calls are looked for where a request does not demand one
    default_chat_template_kwargs: dict[str, Any] = {}  # variables of the template, where a request sets none
    seed: int

    # LoRA adapters
    max_loras: int = 0  # slots; 0: the engine takes none
    max_lora_rank: int = 0
    lora_modules: tuple[LoraModule, ...] = ()
    adapter_bytes: int = 0  # size of the arena that they all lie in

    # batches and cache
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    kv_cache_dtype: str  # "float32" | "bfloat16" | "int8"
    kv_cache_bytes: int  # size of the arena: num_kv_blocks blocks
    enable_prefix_caching: bool
    max_waiting: int
    max_logprobs: int  # of the best tokens at a position that a request may ask for
    max_grammar_bytes: int  # of what a request says of its answer's form
    request_timeout_s: float  # 0: none; a request may set its own `timeout`
    request_priority: bool  # requests may have a `priority`
    max_priority_wait_s: float  # a request that arrives this much later never goes first, whatever its priority

    max_step_time_ms: float = 100.0  # of a step that prompts share with running streams; 0: bounded by tokens alone
    long_prefill_token_threshold: int = 0  # prompts with more left to compute are long; 0: those that no step takes whole
    max_num_partial_prefills: int = 0  # prompts computed in part at a time; 0: no limit
    max_long_partial_prefills: int = 1  # long ones among them, of each source

    # processes
    device: str
    threads: int  # per rank
    memory_nodes: tuple[tuple[int, ...], ...] = ()  # cores of each node, where ranks are bound to them; none: they are not
    ops: str  # "native" | "reference" | "fused" | "cuda"
    allow_variant_ops: bool = False  # where no fused op gives a row the same bits in any company, one that does not will do
    plan: str  # "tape" | "captured" | "eager"
    cpu_kernels: dict[str, str]  # of native ops: variant of each part ("base": the rest); what is not here is as built
    tensor_parallel_size: int = 1  # ranks of a replica
    data_parallel_size: int = 1  # replicas: schedulers, each with its ranks, its cache actor and its KV arena
    data_parallel_routing: str = "prefix"  # "prefix" | "load" | "round-robin"
    enable_expert_parallel: bool = False  # all ranks share the experts of all replicas
    expert_placement_strategy: str = "linear"  # "linear" | "round_robin": which ranks have which at first
    ep_batched_token_timeout_ms: int = 100  # so long new requests are held to fill a step together, where ranks share experts
    ep_mixed_steps: bool = True  # a step may have prefill and decode there
    num_max_dispatch_tokens_per_rank: int = 0  # rows of the windows through which these exchange them, resident from the start
    enable_eplb: bool = False  # experts move between ranks by how much they are asked for
    eplb_config: EplbConfig = EplbConfig()
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    cudagraph_capture_sizes: tuple[int, ...] = ()  # rows that steps are captured for, the largest first; none: they are not
    max_cudagraph_capture_size: int = 0
    graph_only_prefill: bool = False  # steps of prompts are captured, instead of those that decode
    group_ports: tuple[int, ...] = ()  # of the loopback, held by the supervisor, where groups of reference ops find each other
    is_cache_estimated: bool = False  # num_kv_blocks is what a card should have room for, which its worker checks
    device_arena_library: str = ""  # the driver by which cards hold KV arenas that outlive the workers; "": they end with them
    comm_bytes: int = 0  # size of the comm arena of a replica, or of all that share experts; 0: it has one rank
    api_processes: int
    tokenizer_processes: int
    restart_limit: int  # deaths of one actor within restart_window_s that end the engine
    restart_window_s: float
    hang_timeout_s: float
    load_timeout_s: float
    stop_timeout_s: float

    # pictures and video, of vision models alone
    media_processes: int = 0  # 0: the model takes text alone, or is to
    media_memory: int = 256 << 20  # bytes of what was fetched, of each HTTP process
    mm_processor_cache_gb: float = 0.25  # GiB of pixels, of each media process
    encoder_cache_size: int = 0  # rows of each replica's encoder arena: tokens
    encoder_row_width: int = 0  # numbers of a row
    max_image_pixels: int = 89_000_000
    max_media_bytes: int = 32 << 20  # of a picture; a video may have twice as many
    limit_mm_per_prompt: dict[str, int] = {}  # of each modality
    mm_processor_kwargs: dict[str, Any] = {}  # over what the checkpoint's processor files say
    media_io_kwargs: dict[str, Any] = {}  # by modality: how a file is read
    language_model_only: bool = False
    vision_quantization: str = "none"  # "none" | "wint8": of the encoder's weights
    enable_mm_embeds: bool = True  # requests may bring features that they encoded themselves
    media_download_parallel: int = 8  # links of a request
    media_fetch_timeout_s: float = 10.0  # of a link; of a video's three times as long
    allowed_media_domains: tuple[str, ...] = ()  # hosts of links; empty: all public ones
    allowed_media_networks: tuple[str, ...] = ()  # that links may lead to, public or not
    allowed_local_media_path: str = ""  # directory of `file:` links; empty: there are none
    object_store_endpoint: str = ""  # URL, of s3: and bos: links; empty: the scheme's own
    object_store_region: str = ""  # empty: the scheme's usual one
    object_store_access_key: str = ""  # that signs them; empty: there are no such links
    object_store_secret_key: str = ""
    object_store_session_token: str = ""
    allowed_object_buckets: tuple[str, ...] = ()  # that such links may name, with the beginning of a key; "*": all
    encoder_depth: int = 0  # layers of the vision encoder
    encoder_passes: int = 0  # over the rows of its units
    encoder_whole_layers: tuple[int, ...] = ()  # of these, those whose patches see all of their picture
    encoder_attention_cost: float = 0.0  # of such a layer: times the square of a unit's rows, as `encoder_cost.py` counts
    max_num_batched_encoder_embeds: int = 0  # rows of features for which a step may run the matrices of all layers
    disable_chunked_mm_input: bool = False  # no chunk ends inside a picture
    mm_chunk_tokens: int = 0  # that chunks of prompts with media are meant to have; 0: max_num_batched_tokens

    # HTTP
    host: str
    port: int
    api_key: tuple[str, ...]  # digests (`engine/keys.py`), as those of the next two
    api_key_priority: tuple[tuple[str, int], ...]  # keys with a priority of their own, the best that their requests get
    admin_key: str
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_body_bytes: int
    max_files_size: int  # bytes of all files that clients uploaded, and of batches' answers
    max_files_size_per_user: int
    max_connections: int
    max_connections_per_address: int = 0  # 0: no address takes more than it leaves free
    trusted_proxies: tuple[str, ...] = ()  # networks of proxies that say who their client is
    uds: str  # path of the UNIX socket that is listened on instead of host and port; empty: none
    root_path: str  # below which a proxy shows this server, such as "/llm"; empty: at the top
    ssl_keyfile: str
    ssl_certfile: str  # with these requests come over TLS; empty: they do not
    sse_keep_alive_interval_s: float  # silence of a stream that a comment ends; 0: none does

    # run
    run_id: str
    run_dir: str
    print_client: str  # whose settings are printed at the start; "none": nobody's
    kv_events_endpoint: str  # ZeroMQ endpoint of the KV events; empty: ipc:// in the run directory
    log_level: str
    log_format: str = "text"  # "text" | "json"
    log_requests: bool = False  # ids, lengths and parameters, never text
    otlp_traces_endpoint: str = ""  # URL that takes spans of requests; empty: none are made
    metrics_prefix: str = "tokamak"  # of the names at /metrics
    trace: bool = False  # the actors' last events are always kept

    @property
    def has_cache_on_host(self) -> bool:
        """Whether the KV arena is where keys and values are; else no more of it is used than marks of them."""
        return self.device == "cpu"

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def are_rank_groups_whole(self) -> bool:
        """Whether ranks exchange tensors in Paddle's groups of processes, which cannot lose one: a rank that dies ends its
        group."""
        return self.ops != "native"

    @property
    def num_groups(self) -> int:
        """Paddle's groups of ranks: one for each replica, and one for all ranks that share experts."""
        if not self.are_rank_groups_whole:
            return 0
        return (self.data_parallel_size if self.tensor_parallel_size > 1 else 0) + self.enable_expert_parallel

    @property
    def num_redundant_experts(self) -> int:
        """Redundant experts of a layer."""
        return self.eplb_config.num_redundant_experts if self.enable_eplb else 0

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and answer: as many as the model allows and the whole KV cache holds."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size)

    @property
    def kernels_text(self) -> str:
        """The variants of the kernels."""
        return text_of_kernels(self.cpu_kernels)

    @property
    def url(self) -> str:
        """Address at which programs on this machine reach the engine over HTTP."""
        return self.url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    def url_of(self, host: str) -> str:
        """`http://host:port`, an IPv6 address in brackets; of a UNIX socket `unix:PATH`."""
        if self.uds:
            return f"unix:{self.uds}"
        name = f"[{host}]" if ":" in host else host
        return f"{'https' if self.ssl_certfile else 'http'}://{name}:{self.port}"
