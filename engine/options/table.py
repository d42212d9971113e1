"""Options of `tokamak serve`: one table.

`read.py` reads them and checks each value by itself; `resolve.py` checks them against each other and the model, fills in the
defaults that depend on those, and builds the frozen EngineConfig.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from engine.checkpoint.hubs.hub import HUBS
from engine.config import MAX_LOGPROBS, MAX_LORA_RANK, MAX_LORAS, MAX_REPLICAS, EplbConfig, SpeculativeConfig
from engine.options.eplb_config import parse_eplb_config
from engine.options.kinds import (
    Kind,
    address,
    choice,
    choice_or_plugin,
    count,
    count_or_auto,
    flag,
    gibibytes,
    host,
    identifier,
    key_priorities,
    milliseconds,
    networks,
    num_bytes,
    path,
    path_or_auto,
    power_of_two,
    seconds,
    share,
    template,
    text,
    texts,
    whole,
    whole_numbers,
)
from engine.options.lora_modules import parse_lora_modules
from engine.options.media_options import parse_limits, parse_object
from engine.options.pooler_config import parse_pooler_config
from engine.options.speculative_config import parse_speculative_config
from engine.parallel.routing import Policy
from engine.parsers.choice import CALL_PARSERS, REASONING_PARSERS

MAX_RANKS = MAX_REPLICAS


class Option(msgspec.Struct, frozen=True):
    """One option: its `name` on the command line and in files, and its default (None: set by `engine/options/resolve.py`)."""

    name: str
    kind: Kind
    default: Any
    help: str
    short: str = ""  # alternative name on the command line, such as -dp
    takes_several: bool = False  # several values after the name, as in vLLM

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


class OptionValues(msgspec.Struct):
    """Values of all options (the default if not given), and the names of those that were given."""

    values: dict[str, Any]
    given: set[str]
    notes: list[str] = []  # harmless notes for the user
    embedded_models: Mapping[str, str] = {}  # directories of the models that come with the program, by their --demo name


GROUPS: dict[str, tuple[Option, ...]] = {
    "model": (
        Option(
            "model",
            text("MODEL"),
            None,
            "model to serve: a checkpoint directory, a .gguf file, or owner/model on the Hugging Face hub; default: "
            "the embedded model",
        ),
        Option(
            "demo",
            choice("text", "vision"),
            "text",
            "embedded model to serve when no model is given; text: does arithmetic and spelling, vision: reads images",
        ),
        Option(
            "served-model-name",
            texts("NAME"),
            None,
            "model name(s) that clients use; default: the name of the model, and the path as it was given",
            takes_several=True,
        ),
        Option(
            "ignore-config-keys",
            texts("KEY"),
            None,
            "options of config.json that are ignored although they are not supported; default: a model with such options is "
            "refused",
            takes_several=True,
        ),
        Option(
            "runner",
            choice("auto", "generate", "pooling"),
            "auto",
            "generate: produce text; pooling: produce embeddings and scores of whole prompts; auto: detect from the checkpoint",
        ),
        Option(
            "pooler-config",
            Kind("JSON", parse_pooler_config, show=json.dumps),
            {},
            "JSON that overrides the pooling settings of the checkpoint: pooling_type (LAST, MEAN, CLS), normalize, "
            'classifier_from_token (two tokens, such as ["no", "yes"])',
        ),
        Option(
            "dtype",
            choice("auto", "float32", "bfloat16"),
            "auto",
            "data type of weights that are not quantized; auto: the fastest on this processor",
        ),
        Option(
            "quantization",
            choice("none", "wint8", "wint4", "auto"),
            "none",
            "quantize linear weights to 8 or 4 bits while loading; auto: as little as makes them fit into memory",
        ),
        Option(
            "quantization-group-size",
            whole(0, 128),
            0,
            "inputs that share a scale with --quantization: 32, 64 or 128; 0: 64 for wint4, all for wint8",
        ),
        Option(
            "quantization-calibration",
            path("FILE"),
            "",
            "statistics of the model over a text, by which --quantization rounds weights (`tokamak calibrate`)",
        ),
        Option("hub", choice(*HUBS), "huggingface", "hub of models that are named owner/model"),
        Option("revision", text("NAME"), "", "branch, tag or commit of a model on the hub; default: its main branch"),
        Option(
            "tokenizer", text("MODEL"), "", "directory or owner/model of the tokenizer; default: the tokenizer of the model"
        ),
        Option("tokenizer-revision", text("NAME"), "", "branch, tag or commit of the tokenizer"),
        Option(
            "generation-config",
            text("DIR"),
            "auto",
            "source of the sampling defaults; auto: the model, vllm: none, otherwise a directory with a generation_config.json",
        ),
        Option(
            "override-generation-config",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'JSON that overrides the sampling defaults, such as {"temperature": 0.6}',
        ),
        Option(
            "max-model-len",
            count_or_auto(2),
            None,
            "maximum tokens of a prompt and its answer, such as 32k; auto: what fits into memory; default: the limit of the "
            "model, or what the default KV cache holds",
        ),
        Option("check-memory", flag(), True, "refuse to start an engine that does not fit into memory"),
        Option("enable-lora", flag(), False, "accept LoRA adapters; each is served under a model name of its own"),
        Option(
            "lora-modules",
            Kind("NAME=PATH", parse_lora_modules, is_list=True, show=str),
            (),
            "adapters to load at startup: directories in PEFT format",
            takes_several=True,
        ),
        Option(
            "max-loras",
            whole(1, MAX_LORAS),
            None,
            "maximum number of adapters loaded at a time; default: 4, or the number of --lora-modules",
        ),
        Option("max-lora-rank", whole(1, MAX_LORA_RANK), 16, "maximum rank of an adapter; memory is reserved for it"),
        Option(
            "load-format",
            choice("auto", "safetensors", "dummy"),
            "auto",
            "format of the weights; dummy: random weights, only config.json is needed",
        ),
        Option("weight-cache", flag(), True, "keep packed weights in a file that later starts map into memory"),
        Option(
            "weight-cache-dir",
            path("DIR"),
            None,
            "directory of packed weights and kernel timings; default: tokamak/weights in the user's cache directory",
        ),
        Option(
            "weight-cache-limit",
            num_bytes(0),
            20 << 30,
            "maximum size of all packed weights; the least recently used files are removed first",
        ),
        Option("chat-template", template("TEMPLATE"), "", "Jinja file or text that replaces the chat template of the model"),
        Option(
            "trust-request-chat-template",
            flag(),
            False,
            "accept a chat_template in requests; without this such a request gets a 400",
        ),
        Option(
            "default-chat-template-kwargs",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'JSON with default variables for the chat template, such as {"enable_thinking": false}',
        ),
        Option(
            "tool-call-parser",
            choice_or_plugin("auto", "none", *CALL_PARSERS),
            "auto",
            "parser for tool calls in answers; auto: detect from the chat template, none: leave tool calls in the text",
        ),
        Option(
            "reasoning-parser",
            choice_or_plugin("auto", "none", *REASONING_PARSERS),
            "auto",
            "parser for reasoning in answers; auto: detect from the chat template and vocabulary, none: leave "
            "reasoning in the text",
        ),
        Option(
            "plugins",
            texts("NAME"),
            (),
            "installed packages, or entry points of theirs, from which families of models (tokamak.families) and parsers "
            "(tokamak.parsers) are loaded; their code runs in every process of the engine; default: none",
            takes_several=True,
        ),
        Option("enable-auto-tool-choice", flag(), True, "parse tool calls when tool_choice is auto"),
        Option("seed", whole(0, (1 << 64) - 1), 0, "seed of random weights (--load-format dummy)"),
    ),
    "batches and cache": (
        Option("max-num-seqs", whole(1, 4096), 32, "maximum number of sequences in a batch"),
        Option(
            "max-num-batched-tokens",
            count(1, 1 << 20),
            512,
            "maximum number of tokens in a step; longer prompts are computed in chunks",
        ),
        Option("block-size", power_of_two(1, 1024), 16, "tokens per KV block"),
        Option("num-kv-blocks", whole(2), None, "number of KV blocks; overrides --kv-cache-memory"),
        Option(
            "kv-cache-memory",
            num_bytes(1),
            None,
            "size of the KV cache; default: enough for a full batch, at most 1GiB and a quarter of free memory",
        ),
        Option(
            "gpu-memory-utilization",
            share(0.05),
            0.9,
            "fraction of GPU memory that the engine may use, if Paddle reports it; the KV cache gets what is left. "
            "--num-kv-blocks and --kv-cache-memory override it",
        ),
        Option(
            "kv-cache-dtype",
            choice("auto", "float32", "bfloat16", "int8"),
            "auto",
            "data type of keys and values; auto: bfloat16 if the weights are narrower than float32",
        ),
        Option("enable-prefix-caching", flag(), True, "reuse the KV cache of common prompt prefixes"),
        Option(
            "state-cache-interval",
            whole(1, 1 << 31),
            None,
            "models with recurrent layers: tokens between the states of a prompt that are kept for later requests, a multiple "
            "of --block-size; default: --max-num-batched-tokens, or more if those of the longest prompt take over half of the "
            "slots",
        ),
        Option(
            "state-cache-memory",
            num_bytes(0),
            None,
            "models with recurrent layers: memory for kept states, beside three for each of --max-num-seqs; 0: none are kept; "
            "default: at most 1GiB and an eighth of free memory",
        ),
        Option(
            "max-num-batched-encoder-embeds",
            whole(1, 1 << 20),
            None,
            "media tokens that one step encodes through the whole vision encoder; larger items are encoded over "
            "several steps. Default: the equivalent of --max-num-batched-tokens in cost",
        ),
        Option(
            "disable-chunked-mm-input",
            flag(),
            False,
            "never split an image between two chunks; an image larger than a chunk gets a 400",
        ),
        Option(
            "mm-chunk-tokens",
            whole(1, 1 << 20),
            None,
            "target number of tokens in a chunk that contains media; default: --max-num-batched-tokens",
        ),
        Option(
            "max-waiting",
            whole(1),
            1024,
            "maximum waiting sequences per client (twice as many for all clients together); further requests get a 429",
        ),
        Option(
            "max-logprobs",
            whole(0, MAX_LOGPROBS),
            20,
            "maximum number of log-probabilities per position that a request may ask for",
        ),
        Option("max-grammar-bytes", whole(1, 1 << 20), 64 << 10, "maximum size of a schema, regex or grammar"),
        Option("request-timeout", seconds(0), 0.0, "maximum duration of a request; 0: no limit"),
        Option(
            "request-priority", flag(), True, "accept the priority field in requests; without this such a request is rejected"
        ),
        Option(
            "max-step-time",
            milliseconds(0),
            100.0,
            "maximum duration of a step, in milliseconds, while streams run beside prompts; 0: limit steps by tokens only",
        ),
        Option(
            "long-prefill-token-threshold",
            whole(0, 1 << 31),
            0,
            "a prompt with more tokens left than this is long and gets at most this many per step; 0: a prompt is "
            "long if it does not fit into one step",
        ),
        Option(
            "max-num-partial-prefills",
            whole(0, 1 << 16),
            0,
            "maximum number of prompts computed in part at a time; 0: no limit",
        ),
        Option(
            "max-long-partial-prefills", whole(1, 1 << 16), 1, "maximum number of long prompts of one user computed at a time"
        ),
        Option(
            "max-priority-wait",
            seconds(0),
            30.0,
            "a request runs before all requests that arrive this much later, whatever their priority",
        ),
    ),
    "processes": (
        Option("device", text("NAME"), "auto", "device of the model: auto, cpu, gpu, xpu, or a custom device of Paddle"),
        Option(
            "tensor-parallel-size",
            whole(1, MAX_RANKS),
            1,
            "ranks per replica; each computes a share of the heads and columns of every matrix",
            short="-tp",
        ),
        Option("pipeline-parallel-size", whole(1, MAX_RANKS), 1, "only 1 is supported"),
        Option(
            "data-parallel-size",
            whole(1, MAX_RANKS),
            1,
            "number of replicas, each with its own scheduler, ranks and KV cache; batch and cache limits apply to each",
            short="-dp",
        ),
        Option(
            "data-parallel-routing",
            choice(*get_args(Policy)),
            "prefix",
            "how a replica is chosen for a prompt; prefix: by cached prefix and load, load: by load only, round-robin: in turn",
        ),
        Option(
            "enable-expert-parallel",
            flag(),
            False,
            "distribute experts over the ranks of all replicas",
        ),
        Option(
            "expert-placement-strategy",
            choice("linear", "round_robin"),
            "linear",
            "linear: a rank gets consecutive experts; round_robin: consecutive experts go to different ranks",
        ),
        Option(
            "ep-batched-token-timeout-ms",
            whole(0, 3_600_000),
            100,
            "with expert parallelism: maximum milliseconds that new requests wait to be computed together; 0: no wait",
        ),
        Option("ep-mixed-steps", flag(), True, "with expert parallelism: allow prefill and decode in one step"),
        Option(
            "num-max-dispatch-tokens-per-rank",
            whole(1, 1 << 20),
            None,
            "with expert parallelism: token rows per rank in resident exchange memory; default: --max-num-seqs",
        ),
        Option("enable-eplb", flag(), False, "rebalance experts between ranks by their load"),
        Option(
            "eplb-config",
            Kind("JSON", parse_eplb_config, show=lambda config: msgspec.json.encode(config).decode()),
            EplbConfig(),
            "JSON with rebalancing settings: num_redundant_experts, window_size and step_interval (steps), "
            "check_interval_s, statistics_interval_s, min_gain",
        ),
        Option(
            "speculative-config",
            Kind("JSON", parse_speculative_config, show=lambda config: msgspec.json.encode(config).decode()),
            SpeculativeConfig(),
            "JSON with speculative decoding settings (answers keep their bytes): method (ngram, suffix, mtp, or "
            "several as in ngram,suffix), num_speculative_tokens, prompt_lookup_min and ..._max, "
            "suffix_decoding_max_tree_depth, ..._max_cached_requests, ..._max_spec_factor and ..._min_token_prob, "
            "adaptive",
        ),
        Option("threads", whole(1, 1024), None, "threads per rank; default: all cores divided among the ranks"),
        Option(
            "bind-memory-nodes",
            flag(),
            False,
            "bind each rank and its memory to one NUMA node; weights are kept once per node",
        ),
        Option(
            "ops",
            choice("auto", "native", "reference", "fused", "cuda"),
            "auto",
            "implementation of the ops; native: own CPU kernels, cuda: own kernels for NVIDIA GPUs, reference: plain Paddle, "
            "fused: Paddle's fused ops where a check at startup finds them correct",
        ),
        Option(
            "allow-variant-ops",
            flag(),
            False,
            "with --ops fused: start even if answers depend on the batch they are computed in",
        ),
        Option(
            "plan",
            choice("auto", "tape", "captured", "eager"),
            "auto",
            "how the model is executed; tape: recorded once and replayed natively, captured: also as graphs with "
            "padded batch sizes, eager: op by op",
        ),
        Option(
            "cudagraph-capture-sizes",
            whole_numbers(1, 1 << 20),
            (),
            "with --plan captured: batch sizes to capture; default: 1, 2, 4, 8, 16, 24, ... sequences with their draft tokens",
        ),
        Option(
            "max-cudagraph-capture-size",
            whole(1, 1 << 20),
            None,
            "largest batch size to capture; default: 512, or the largest given",
        ),
        Option("graph-only-prefill", flag(), False, "with --plan captured: capture only steps of prompts, not decode steps"),
        Option(
            "cpu-kernels",
            text("VARIANT"),
            "auto",
            "instruction set of the native kernels, such as amx, avx512bf16, avx512, avxvnni, avx2 or portable; "
            "auto: the fastest measured on this machine",
        ),
        Option("api-processes", whole(1, 64), 1, "number of HTTP processes; they share one port"),
        Option("tokenizer-processes", whole(1, 64), 1, "number of tokenizer processes"),
        Option("restart-limit", whole(1), 3, "the engine stops when one process dies this many times within --restart-window"),
        Option("restart-window", seconds(1), 300.0, "time window of --restart-limit"),
        Option("hang-timeout", seconds(1), 60.0, "restart a process that sent no heartbeat for this long"),
        Option("load-timeout", seconds(1), 1800.0, "--hang-timeout for a process that starts and loads weights"),
        Option("stop-timeout", seconds(0.1), 10.0, "time that processes get to stop before SIGKILL"),
    ),
    "images and video": (
        Option(
            "vision-quantization",
            choice("none", "wint8"),
            "none",
            "quantize linear weights of the vision encoder to 8 bits while loading",
        ),
        Option("language-model-only", flag(), False, "serve only the text part of a vision-language model"),
        Option(
            "limit-mm-per-prompt",
            Kind("JSON", parse_limits, show=json.dumps),
            {"image": 999, "video": 999},
            "maximum number of images and videos per prompt",
        ),
        Option(
            "mm-processor-kwargs",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'JSON that overrides the processor files of the checkpoint, such as {"max_pixels": 1003520}',
        ),
        Option(
            "media-io-kwargs",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'JSON with settings for reading media files, such as {"video": {"num_frames": 32}}',
        ),
        Option("enable-mm-embeds", flag(), True, "accept image and video features that clients computed themselves"),
        Option("media-download-parallel", whole(1, 256), 8, "maximum number of links of one request fetched at a time"),
        Option("media-fetch-timeout", seconds(0.1), 10.0, "timeout for fetching a link; three times as long for videos"),
        Option("allowed-media-domains", texts("HOST"), (), "host(s) that media may be fetched from; default: all public hosts"),
        Option(
            "allowed-media-networks",
            networks(),
            (),
            "private network(s) that media may be fetched from, such as 10.0.0.0/8; default: none",
        ),
        Option(
            "allowed-local-media-path",
            path("DIR"),
            "",
            "directory that file: links may point into; default: file: links are rejected",
        ),
        Option(
            "object-store-endpoint", text("URL"), "", "URL of the object store for s3: and bos: links; default: Amazon, Baidu"
        ),
        Option(
            "object-store-region",
            text("NAME"),
            "",
            "region of the object store; default: us-east-1, bj; also read from AWS_REGION",
        ),
        Option("object-store-access-key", text("KEY"), "", "access key of the object store; also read from AWS_ACCESS_KEY_ID"),
        Option(
            "object-store-secret-key",
            text("KEY"),
            "",
            "secret key of the object store; better set AWS_SECRET_ACCESS_KEY, which process lists do not show",
        ),
        Option(
            "object-store-session-token",
            text("TOKEN"),
            "",
            "session token for temporary keys; also read from AWS_SESSION_TOKEN",
        ),
        Option(
            "allowed-object-buckets",
            texts("BUCKET"),
            (),
            "bucket(s) that s3: and bos: links may use, BUCKET/PREFIX for a part of one, *: all; default: none",
        ),
        Option("max-image-pixels", whole(1, 1 << 31), 89_000_000, "maximum pixels of an image or video frame, before resizing"),
        Option("max-media-bytes", num_bytes(1024), 32 << 20, "maximum size of an image file; twice as much for videos"),
        Option("media-processes", whole(1, 64), 1, "number of processes that decode images and video"),
        Option("media-memory", num_bytes(1 << 20), 256 << 20, "memory per HTTP process for media files of open requests"),
        Option("mm-processor-cache-gb", gibibytes(0.001, 1024), 0.25, "GiB per media process for decoded pixels"),
        Option(
            "encoder-cache-size",
            whole(1, 1 << 26),
            None,
            "tokens per replica in the encoder cache; default: the largest image, at least 16384",
        ),
    ),
    "cluster": (
        Option(
            "cluster-listen",
            address(),
            "",
            "address at which `tokamak router` reaches this engine, such as 10.0.0.1:9100; default: no router can",
        ),
        Option(
            "cluster-key-file",
            path("FILE"),
            "",
            "secret key of the cluster (`tokamak key FILE`), needed for every address except a loopback one",
        ),
        Option(
            "cluster-checkpoints",
            texts("DIRECTORY"),
            (),
            "directories with weights and adapters that a router's orders may load; default: the one that contains --model",
        ),
    ),
    "HTTP": (
        Option("host", host("HOST"), "127.0.0.1", "address to listen on; 0.0.0.0: all addresses"),
        Option("port", whole(0, 65535), 8000, "port to listen on; 0: any free port"),
        Option("api-key", texts("KEY"), (), "API key(s), one of which clients must send; default: no key is required"),
        Option(
            "uds",
            path_or_auto("PATH"),
            "",
            "UNIX socket to listen on instead of --host and --port; auto: a socket in the run directory",
        ),
        Option("root-path", text("PATH"), "", "path prefix under which a proxy publishes this server, such as /llm"),
        Option("ssl-certfile", path("FILE"), "", "TLS certificate chain (PEM); only TLS connections are accepted then"),
        Option("ssl-keyfile", path("FILE"), "", "private key of the certificate; default: in the same file"),
        Option(
            "api-key-priority",
            key_priorities(),
            (),
            "priority of an API key; its requests may lower their priority but not raise it; default: as requested",
        ),
        Option("admin-key", text("KEY"), "", "key for /admin; default: /admin is disabled. `tokamak ctl` needs no key"),
        Option(
            "allowed-hosts",
            texts("NAME"),
            (),
            "host name(s) accepted in the Host header, *: any; default: localhost and addresses if --host is a "
            "loopback address, otherwise any",
        ),
        Option(
            "allowed-origins",
            texts("ORIGIN"),
            (),
            "origin(s) of other web pages that may use this server, such as https://chat.example, *: all; default: none",
        ),
        Option("max-body-bytes", num_bytes(1024), 32 << 20, "maximum size of a request body"),
        Option(
            "max-files-size",
            num_bytes(0),
            1 << 30,
            "maximum size of all files of /v1/files and results of /v1/batches, in the run directory",
        ),
        Option("max-files-size-per-user", num_bytes(0), 256 << 20, "maximum size of the files of one user"),
        Option("max-connections", whole(1), 1024, "maximum number of open connections per HTTP process"),
        Option(
            "max-connections-per-address",
            whole(0),
            0,
            "maximum number of open connections per client address; 0: as many as it leaves free for others, so one "
            "address alone can have half of them",
        ),
        Option(
            "trusted-proxies",
            networks(),
            (),
            "network(s) of trusted proxies, such as 10.0.0.0/8; their X-Forwarded-For names the client, and "
            "--max-connections-per-address does not apply to them; default: none",
        ),
        Option(
            "sse-keep-alive-interval",
            seconds(0, 86400),
            10.0,
            "send response headers and then comments on streams that were silent for this long, so that proxies keep "
            "them open; 0: never",
        ),
    ),
    "run": (
        Option(
            "print-client",
            choice(
                "none", "claude-code", "codex", "opencode", "qwen-code", "copilot", "aider", "llm", "pi", "cline", "open-webui"
            ),
            "none",
            "print the settings for this client when the engine is ready",
        ),
        Option("end-with", whole(1, 1 << 30), None, "pid of a process; the engine stops when that process ends"),
        Option("run-dir", path("DIR"), None, "directory of sockets and logs; default: a new directory for each run"),
        Option("kv-events-endpoint", text("ENDPOINT"), "", "ZeroMQ endpoint for KV events; default: in the run directory"),
        Option("log-level", choice("debug", "info", "warning", "error"), "info", "minimum level of log messages"),
        Option("log-format", choice("text", "json"), "text", "text: plain lines, json: one object per line"),
        Option("log-requests", flag(), False, "log the id, lengths, parameters and outcome of every request, never its text"),
        Option(
            "otlp-traces-endpoint",
            text("URL"),
            "",
            "OpenTelemetry collector that receives a span per request, such as http://127.0.0.1:4318/v1/traces",
        ),
        Option(
            "trace",
            flag(),
            False,
            "keep the latest events of each actor in shared memory (1 MiB each), so that `tokamak trace` works after a crash",
        ),
        Option(
            "metrics-prefix",
            identifier(),
            "tokamak",
            "prefix of the metric names at /metrics; vllm: compatible with dashboards made for vLLM",
        ),
    ),
}
OPTIONS = {option.key: option for options in GROUPS.values() for option in options}
