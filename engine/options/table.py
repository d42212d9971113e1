"""Options of `tokamak serve`: one table, read from the command line, the environment and a file, in that order of precedence.

    --max-model-len 4096        command line
    TOKAMAK_MAX_MODEL_LEN=4096  environment
    max-model-len: 4096         --config FILE (YAML or JSON; underscores do as well)

Called once by `engine/supervisor/launch.py`. `read_options` checks each value by itself; `engine/options/resolve.py` checks
them against each other and the model, fills in what depends on both, and makes the frozen EngineConfig.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from engine.config import MAX_LOGPROBS, MAX_LORA_RANK, MAX_LORAS, EplbConfig, SpeculativeConfig
from engine.errors import OptionError
from engine.options.argument_parser import ArgumentParser
from engine.options.eplb_config import parse_eplb_config
from engine.options.kinds import (
    Kind,
    choice,
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
from engine.options.nearest import nearest
from engine.options.other_hosts import FLAGS, OTHER_HOSTS, refuse_other_hosts
from engine.options.pooler_config import parse_pooler_config
from engine.options.speculative_config import parse_speculative_config
from engine.options.vllm import spelled, table, take_flag, translated
from engine.options.vllm_flags import VLLM_FLAGS
from engine.parallel.routing import Policy
from engine.parsers.choice import CALL_PARSERS, REASONING_PARSERS

ENVIRONMENT_PREFIX = "TOKAMAK_"
MAX_RANKS = 64
MAX_SHOWN = 200  # letters of a wrong value
FOREIGN_VARIABLES = {  # of other programs -> the option; ours wins
    "AWS_ACCESS_KEY_ID": "object_store_access_key",
    "AWS_SECRET_ACCESS_KEY": "object_store_secret_key",
    "AWS_SESSION_TOKEN": "object_store_session_token",
    "AWS_REGION": "object_store_region",
}
TOOL_VARIABLES = (
    "TOKAMAK_BUILD_ALL",
    "TOKAMAK_EXTRA",
    "TOKAMAK_PYTHON",
    "TOKAMAK_SHM_NAMESPACE",
    "TOKAMAK_URL",
    "TOKAMAK_VENV",
)  # of tools/serve and the clients


class Option(msgspec.Struct, frozen=True):
    """One row: its `name` on the command line and in files, and the default that is used where nobody gives a value (None:
    worked out by `engine/options/resolve.py`)."""

    name: str
    kind: Kind
    default: Any
    help: str
    short: str = ""  # another spelling on the command line, such as -dp
    takes_several: bool = False  # one after another behind its name, as vLLM has it

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


class OptionValues(msgspec.Struct):
    """What was asked for: a value for every option (the default where none was given), and which were given."""

    values: dict[str, Any]
    given: set[str]
    notes: list[str] = []  # for the user, harmless
    embedded_models: Mapping[str, str] = {}  # directories of those that come with the program, by what --demo calls them


GROUPS: dict[str, tuple[Option, ...]] = {
    "model": (
        Option(
            "model", text("MODEL"), None, "checkpoint directory, .gguf file, or owner/model on the hub; else the embedded one"
        ),
        Option(
            "demo",
            choice("text", "vision"),
            "text",
            "which embedded model is served where none is named: one that calculates and spells, or one that sees",
        ),
        Option(
            "served-model-name",
            texts("NAME"),
            None,
            "name(s) that clients use; default: the model's own, and the path as it was given",
            takes_several=True,
        ),
        Option(
            "runner",
            choice("auto", "generate", "pooling"),
            "auto",
            "what the model is for: text, or vectors and scores of whole prompts; auto: what its files say",
        ),
        Option(
            "pooler-config",
            Kind("JSON", parse_pooler_config, show=json.dumps),
            {},
            "over what its files say of vectors and scores: pooling_type (LAST, MEAN, CLS), normalize, classifier_from_token "
            '(two tokens, such as ["no", "yes"], of a model that says which)',
        ),
        Option(
            "dtype",
            choice("auto", "float32", "bfloat16"),
            "auto",
            "of weights that stay floats; auto: what the processor is best at",
        ),
        Option(
            "quantization", choice("none", "wint8", "wint4"), "none", "round linear weights to 8 or 4 bits when they are loaded"
        ),
        Option("revision", text("NAME"), "", "branch, tag or commit of a model of the hub; default: its main branch"),
        Option("tokenizer", text("MODEL"), "", "directory or owner/model whose tokenizer is used; default: the model's"),
        Option("tokenizer-revision", text("NAME"), "", "its branch, tag or commit"),
        Option(
            "generation-config",
            text("DIR"),
            "auto",
            "where sampling defaults are from: auto: the model; vllm: none; or a directory with a generation_config.json",
        ),
        Option(
            "override-generation-config",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'sampling defaults over these, such as {"temperature": 0.6}',
        ),
        Option(
            "max-model-len",
            count_or_auto(2),
            None,
            "longest prompt with its answer, in tokens, such as 32k; default, and auto: the model's limit",
        ),
        Option("enable-lora", flag(), False, "take LoRA adapters, which are models of names of their own"),
        Option(
            "lora-modules",
            Kind("NAME=PATH", parse_lora_modules, is_list=True, show=str),
            (),
            "adapters that are there from the start: directories as PEFT saves them",
            takes_several=True,
        ),
        Option("max-loras", whole(1, MAX_LORAS), None, "adapters at a time; default: 4, or as many as --lora-modules names"),
        Option("max-lora-rank", whole(1, MAX_LORA_RANK), 16, "the largest rank of an adapter; memory is taken for it"),
        Option("load-format", choice("auto", "safetensors", "dummy"), "auto", "dummy: random weights from config.json alone"),
        Option("weight-cache", flag(), True, "keep weights as the kernels read them in a file, which later starts map"),
        Option(
            "weight-cache-dir",
            path("DIR"),
            None,
            "its directory, and that of which kernels are fastest; default: tokamak/weights in the user's cache directory",
        ),
        Option("weight-cache-limit", num_bytes(0), 20 << 30, "size of all its files; the least recently used ones go first"),
        Option("chat-template", template("TEMPLATE"), "", "Jinja file or text that replaces the model's"),
        Option("trust-request-chat-template", flag(), False, "render with the chat_template that a request brings; off: 400"),
        Option(
            "default-chat-template-kwargs",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'variables of the template where a request sets none, such as {"enable_thinking": false}',
        ),
        Option(
            "tool-call-parser",
            choice("auto", "none", *CALL_PARSERS),
            "auto",
            "how calls of tools are read in answers; auto: as the chat template writes them; none: they stay text",
        ),
        Option(
            "reasoning-parser",
            choice("auto", "none", *REASONING_PARSERS),
            "auto",
            "how thinking is read in answers; auto: by the chat template and the vocabulary; none: it stays text",
        ),
        Option("enable-auto-tool-choice", flag(), True, "look for calls where a request leaves it to the model to make one"),
        Option("seed", whole(0, (1 << 64) - 1), 0, "seed of random weights (--load-format dummy)"),
    ),
    "batches and cache": (
        Option("max-num-seqs", whole(1, 4096), 32, "samples in the batch"),
        Option("max-num-batched-tokens", count(1, 1 << 20), 512, "tokens computed in one step; longer prompts go in chunks"),
        Option("block-size", power_of_two(1, 1024), 16, "tokens of a KV block"),
        Option("num-kv-blocks", whole(2), None, "KV blocks; wins over --kv-cache-memory"),
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
            "how much of a card an engine may take, where Paddle tells its memory: the cache has what all else leaves of it; "
            "--num-kv-blocks and --kv-cache-memory win",
        ),
        Option(
            "kv-cache-dtype",
            choice("auto", "float32", "bfloat16", "int8"),
            "auto",
            "type of keys and values; auto: bfloat16 where the weights are narrower than float32",
        ),
        Option("enable-prefix-caching", flag(), True, "reuse the KV of equal prompt beginnings"),
        Option(
            "max-num-batched-encoder-embeds",
            whole(1, 1 << 20),
            None,
            "tokens of media for which a step runs all layers of the vision encoder, and fewer layers of more; default: what "
            "costs as much as --max-num-batched-tokens of text",
        ),
        Option("disable-chunked-mm-input", flag(), False, "no chunk ends inside a picture; one that is longer: 400"),
        Option("mm-chunk-tokens", whole(1, 1 << 20), None, "tokens of a chunk with media; default: --max-num-batched-tokens"),
        Option(
            "max-waiting", whole(1), 1024, "samples of one source that may wait, twice as many of all; more: refused with 429"
        ),
        Option(
            "max-logprobs",
            whole(0, MAX_LOGPROBS),
            20,
            "tokens at a position whose log-probabilities a request may ask for",
        ),
        Option("max-grammar-bytes", whole(1, 1 << 20), 64 << 10, "of a schema, regex or grammar; a longer one is refused"),
        Option("request-timeout", seconds(0), 0.0, "longest time for a request; 0: no limit"),
        Option("request-priority", flag(), True, "requests may have a priority; without, one that has is refused"),
        Option(
            "max-step-time",
            milliseconds(0),
            100.0,
            "milliseconds: longest step while streams run and prompts are computed beside them; 0: bounded by tokens alone",
        ),
        Option(
            "long-prefill-token-threshold",
            whole(0, 1 << 31),
            0,
            "prompts with more tokens left to compute are long, and get no more of a step; 0: long is what no step takes whole",
        ),
        Option("max-num-partial-prefills", whole(0, 1 << 16), 0, "prompts that are computed in part at a time; 0: no limit"),
        Option("max-long-partial-prefills", whole(1, 1 << 16), 1, "long prompts of a user that are computed side by side"),
        Option(
            "max-priority-wait",
            seconds(0),
            30.0,
            "a request goes before all that arrive this much later, whatever their priorities",
        ),
    ),
    "processes": (
        Option("device", text("NAME"), "auto", "where the model runs: auto, cpu, gpu, xpu, or a custom device of Paddle"),
        Option(
            "tensor-parallel-size",
            whole(1, MAX_RANKS),
            1,
            "ranks of a replica, which share its model: each computes some heads and columns of every matrix",
            short="-tp",
        ),
        Option("pipeline-parallel-size", whole(1, MAX_RANKS), 1, "1: layers are not cut"),
        Option(
            "data-parallel-size",
            whole(1, MAX_RANKS),
            1,
            "replicas, each with a scheduler, ranks and a KV cache of its own; limits of batches and caches are for each",
            short="-dp",
        ),
        Option(
            "data-parallel-routing",
            choice(*get_args(Policy)),
            "prefix",
            "what chooses a prompt's replica; prefix: what is cached and what there is to do; load: that alone",
        ),
        Option(
            "enable-expert-parallel",
            flag(),
            False,
            "all ranks share the experts of all replicas: each computes some of them, for the rows of all",
        ),
        Option(
            "expert-placement-strategy",
            choice("linear", "round_robin"),
            "linear",
            "linear: a rank has experts that are neighbours; round_robin: neighbours lie on different ranks",
        ),
        Option(
            "ep-batched-token-timeout-ms",
            whole(0, 3_600_000),
            100,
            "with shared experts, so many milliseconds newcomers are held at most to be computed together; 0: they are not",
        ),
        Option("ep-mixed-steps", flag(), True, "with shared experts, a step may compute prompts and continue answers"),
        Option(
            "num-max-dispatch-tokens-per-rank",
            whole(1, 1 << 20),
            None,
            "with shared experts, rows that a rank can show the others in memory that is resident from the start; default: "
            "--max-num-seqs",
        ),
        Option("enable-eplb", flag(), False, "experts move between the ranks that share them, by how much they are asked for"),
        Option(
            "eplb-config",
            Kind("JSON", parse_eplb_config, show=lambda config: msgspec.json.encode(config).decode()),
            EplbConfig(),
            "how they move: num_redundant_experts, window_size and step_interval (steps), check_interval_s, "
            "statistics_interval_s, min_gain",
        ),
        Option(
            "speculative-config",
            Kind("JSON", parse_speculative_config, show=lambda config: msgspec.json.encode(config).decode()),
            SpeculativeConfig(),
            "drafts, verified without changing a byte: method (ngram, suffix, mtp, or several as in ngram,suffix), "
            "num_speculative_tokens, prompt_lookup_min and ..._max, suffix_decoding_max_tree_depth, ..._max_cached_requests, "
            "..._max_spec_factor and ..._min_token_prob, adaptive",
        ),
        Option("threads", whole(1, 1024), None, "threads of each rank; default: cores shared out"),
        Option(
            "bind-memory-nodes",
            flag(),
            False,
            "each rank and its memory stay on one of the machine's memory nodes (sockets); weights are kept once for each",
        ),
        Option(
            "ops",
            choice("auto", "native", "reference", "fused", "cuda"),
            "auto",
            "native: our own kernels (CPU); reference: plain Paddle; fused: with Paddle's fused ops, as far as they are "
            "right where it runs, which is checked at the start; cuda: our own kernels on NVIDIA GPUs",
        ),
        Option(
            "allow-variant-ops",
            flag(),
            False,
            "with --ops fused: start also where an answer's bits depend on what is computed beside it",
        ),
        Option(
            "plan",
            choice("auto", "tape", "captured", "eager"),
            "auto",
            "tape: the model recorded, and replayed natively; captured: also for fixed numbers of rows, to which steps are "
            "padded, as device graphs are; eager: op by op",
        ),
        Option(
            "cudagraph-capture-sizes",
            whole_numbers(1, 1 << 20),
            (),
            "with --plan captured, rows of steps; default: 1, 2, 4, 8, 16, 24, ... samples with their drafts",
        ),
        Option(
            "max-cudagraph-capture-size", whole(1, 1 << 20), None, "the largest of these; default: 512, or the largest given"
        ),
        Option("graph-only-prefill", flag(), False, "with --plan captured: steps of prompts alone are, and none that decode"),
        Option(
            "cpu-kernels",
            text("VARIANT"),
            "auto",
            "instruction set of the native kernels, such as amx, avx512bf16, avx512, avxvnni, avx2 or portable; auto: for each "
            "type of weights and for attention what was timed to be fastest here",
        ),
        Option("api-processes", whole(1, 64), 1, "HTTP processes on the one port"),
        Option("tokenizer-processes", whole(1, 64), 1, "tokenizer processes"),
        Option("restart-limit", whole(1), 3, "deaths of one process within the window that end the engine"),
        Option("restart-window", seconds(1), 300.0, "the window"),
        Option("hang-timeout", seconds(1), 60.0, "a process without heartbeat for so long is killed and started again"),
        Option("load-timeout", seconds(1), 1800.0, "the same while it starts and loads"),
        Option("stop-timeout", seconds(0.1), 10.0, "between the request to end and SIGKILL"),
    ),
    "pictures and video": (
        Option(
            "vision-quantization",
            choice("none", "wint8"),
            "none",
            "round the vision encoder's linear weights to 8 bits when they are loaded",
        ),
        Option("language-model-only", flag(), False, "serve a vision model's text side alone"),
        Option(
            "limit-mm-per-prompt",
            Kind("JSON", parse_limits, show=json.dumps),
            {"image": 999, "video": 999},
            "pictures and videos in a prompt",
        ),
        Option(
            "mm-processor-kwargs",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'over the checkpoint\'s processor files, such as {"max_pixels": 1003520}',
        ),
        Option(
            "media-io-kwargs",
            Kind("JSON", parse_object, show=json.dumps),
            {},
            'how files are read, such as {"video": {"num_frames": 32}}',
        ),
        Option("enable-mm-embeds", flag(), True, "take pictures and video that clients encoded into features themselves"),
        Option("media-download-parallel", whole(1, 256), 8, "links of a request that are fetched at once; 1: one by one"),
        Option("media-fetch-timeout", seconds(0.1), 10.0, "for what a link leads to; for a video three times as long"),
        Option("allowed-media-domains", texts("HOST"), (), "host(s) that links may name; default: all public ones"),
        Option(
            "allowed-media-networks",
            networks(),
            (),
            "private network(s) that links may lead to, such as 10.0.0.0/8; default: none",
        ),
        Option("allowed-local-media-path", path("DIR"), "", "directory beneath which file: links may lead; default: none do"),
        Option("object-store-endpoint", text("URL"), "", "of s3: and bos: links; default: Amazon's, Baidu's"),
        Option("object-store-region", text("NAME"), "", "its region; default: us-east-1, bj. AWS_REGION will do"),
        Option("object-store-access-key", text("KEY"), "", "that signs such links. AWS_ACCESS_KEY_ID will do"),
        Option("object-store-secret-key", text("KEY"), "", "AWS_SECRET_ACCESS_KEY will do, and shows in no list of processes"),
        Option("object-store-session-token", text("TOKEN"), "", "of keys for a while. AWS_SESSION_TOKEN will do"),
        Option(
            "allowed-object-buckets",
            texts("BUCKET"),
            (),
            "bucket(s) that s3: and bos: links may name, BUCKET/PREFIX for a part of one, *: all; default: none",
        ),
        Option("max-image-pixels", whole(1, 1 << 31), 89_000_000, "largest picture or frame, before it is made smaller"),
        Option("max-media-bytes", num_bytes(1024), 32 << 20, "largest file of a picture; of a video twice as much"),
        Option("media-processes", whole(1, 64), 1, "processes that decode pictures and video"),
        Option("media-memory", num_bytes(1 << 20), 256 << 20, "of each HTTP process, for files of requests under way"),
        Option("mm-processor-cache-gb", gibibytes(0.001, 1024), 0.25, "of each media process, for decoded pixels"),
        Option(
            "encoder-cache-size",
            whole(1, 1 << 26),
            None,
            "tokens whose features are kept, of each replica; default: the largest picture, at least 16384",
        ),
    ),
    "HTTP": (
        Option("host", host("HOST"), "127.0.0.1", "address to listen on; 0.0.0.0: all"),
        Option("port", whole(0, 65535), 8000, "port to listen on; 0: any free one"),
        Option("api-key", texts("KEY"), (), "key(s) that clients must send; default: none is asked for"),
        Option(
            "uds",
            path_or_auto("PATH"),
            "",
            "UNIX socket to listen on, instead of --host and --port; auto: one in the run's directory",
        ),
        Option("root-path", text("PATH"), "", "path below which a proxy shows this server, such as /llm"),
        Option("ssl-certfile", path("FILE"), "", "certificate (PEM, with those above it): requests come over TLS alone"),
        Option("ssl-keyfile", path("FILE"), "", "its key; default: it is in the same file"),
        Option(
            "api-key-priority",
            key_priorities(),
            (),
            "priority of a key's requests, which they may make worse but not better; default: what they ask for",
        ),
        Option("admin-key", text("KEY"), "", "key for /admin; default: /admin answers nobody; `tokamak ctl` needs none"),
        Option(
            "allowed-hosts",
            texts("NAME"),
            (),
            "name(s) that clients may call this server by, *: any; default: localhost and addresses where --host is a "
            "loopback address, else any",
        ),
        Option(
            "allowed-origins",
            texts("ORIGIN"),
            (),
            "origin(s) of other web pages, such as https://chat.example, that may use this server, *: all; default: none",
        ),
        Option("max-body-bytes", num_bytes(1024), 32 << 20, "largest request body"),
        Option(
            "max-files-size", num_bytes(0), 1 << 30, "all files of /v1/files and answers of /v1/batches, in the run's directory"
        ),
        Option("max-files-size-per-user", num_bytes(0), 256 << 20, "of these, those of one user"),
        Option("max-connections", whole(1), 1024, "open connections of one HTTP process"),
        Option(
            "max-connections-per-address",
            whole(0),
            0,
            "open connections of one client address; 0: no more than it leaves free for others, so one alone has half of all",
        ),
        Option(
            "trusted-proxies",
            networks(),
            (),
            "network(s) of proxies, such as 10.0.0.0/8: their X-Forwarded-For names the client, and their connections are not "
            "limited by address; default: none",
        ),
        Option(
            "sse-keep-alive-interval",
            seconds(0, 86400),
            10.0,
            "a stream that was silent for so long gets a comment, and before its first token its head, so that no proxy gives "
            "up on it; 0: never",
        ),
    ),
    "run": (
        Option(
            "print-client",
            choice(
                "none", "claude-code", "codex", "opencode", "qwen-code", "copilot", "aider", "llm", "pi", "cline", "open-webui"
            ),
            "none",
            "print that client's settings once the engine is ready",
        ),
        Option("end-with", whole(1, 1 << 30), None, "id of a process: the engine ends when that has ended"),
        Option("run-dir", path("DIR"), None, "directory of sockets and logs; default: a new one for each run"),
        Option("kv-events-endpoint", text("ENDPOINT"), "", "ZeroMQ endpoint of the KV events; default: in the run directory"),
        Option("log-level", choice("debug", "info", "warning", "error"), "info", "of the actors' logs"),
        Option("log-format", choice("text", "json"), "text", "of these: lines to read, or an object a line"),
        Option("log-requests", flag(), False, "log each request's id, lengths, parameters and end; never its text"),
        Option(
            "otlp-traces-endpoint",
            text("URL"),
            "",
            "OpenTelemetry collector that gets a span of each request, such as http://127.0.0.1:4318/v1/traces",
        ),
        Option("trace", flag(), False, "keep the actors' last events for `tokamak trace`, for when it has died; 1 MiB each"),
        Option("metrics-prefix", identifier(), "tokamak", "what names at /metrics begin with; vllm: others' dashboards fit"),
    ),
}
OPTIONS = {option.key: option for options in GROUPS.values() for option in options}


def read_options(
    arguments: Sequence[str], environment: Mapping[str, str], embedded_models: Mapping[str, str] | None = None
) -> OptionValues:
    """The values asked for; `embedded_models`: the directories of which --demo chooses where no model is named. OptionError
    says which one is wrong, where it came from and what would be right; --help and what argparse itself refuses end the process
    (0, 2)."""
    defaults = {option.key: option.default for option in OPTIONS.values()}
    found = OptionValues(defaults, set(), embedded_models=embedded_models or {})
    parser = make_parser()
    command_line = vars(parser.parse_args(spelled(arguments)))
    config_path = command_line.pop("config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    model = command_line.pop("MODEL", None)
    if model is not None and model.startswith("-"):  # argparse takes an option for a value where it has a space in it
        parser.refuse(model)
    if model is not None and command_line.get("model", model) != model:
        raise OptionError(f"two models are given, {model} and --model {command_line['model']}; give one")
    if model is not None:
        command_line["model"] = model
    if config_path is not None:
        _take_file(found, Path(config_path))
    _take_environment(found, environment)
    for key, value in command_line.items():
        _take(found, key, value, f"--{key.replace('_', '-')}")
    return found


def make_parser() -> ArgumentParser:
    """The command line, in groups. Values stay texts: they are checked like those of the other sources."""
    parser = ArgumentParser(
        prog="tokamak serve",
        usage="tokamak serve [MODEL] [options]",
        description="Start the engine and serve a model over HTTP.",
        epilog="Every option can also be given as TOKAMAK_<NAME> in the environment or as a name in the --config file; "
        "the command line wins over the environment, the environment over the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("MODEL", nargs="?", help="same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file of option names and values")
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add_argument(group, option)
    kind: dict[str, Any]
    for key in OTHER_HOSTS:
        kind = {"action": argparse.BooleanOptionalAction} if key in FLAGS else {"nargs": "?", "const": ""}
        parser.add_argument(f"--{key.replace('_', '-')}", help=argparse.SUPPRESS, **kind)
    for key, fate in VLLM_FLAGS.items():
        if key not in OPTIONS:
            kind = {"action": argparse.BooleanOptionalAction} if fate.is_flag else {"nargs": "?", "const": ""}
            parser.add_argument(f"--{key.replace('_', '-')}", help=argparse.SUPPRESS, **kind)
    parser.add_argument("--vllm-flags", action=_ShowFlags, help="show what becomes of each flag of `vllm serve`, and end")
    return parser


class _ShowFlags(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = None, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(table(OPTIONS))
        parser.exit()


def _add_argument(group: argparse._ArgumentGroup, option: Option) -> None:
    shown = option.help.replace("%", "%%")
    if option.kind.is_flag:
        group.add_argument(
            f"--{option.name}",
            action=argparse.BooleanOptionalAction,
            help=f"{shown} (default: {'yes' if option.default else 'no'})",
        )
        return
    if option.default not in (None, "", (), {}):
        shown += f" (default: {option.kind.show(option.default)})"
    names = (f"--{option.name}", *filter(None, [option.short]))
    kind: dict[str, Any] = {"action": "append" if option.kind.is_list else "store"}
    if option.takes_several:
        kind = {"action": "extend", "nargs": "+"}
    group.add_argument(*names, metavar=option.kind.metavar, help=shown, **kind)


def _take_file(found: OptionValues, path: Path) -> None:
    for name, value in _read_file(path).items():
        key = str(name).replace("-", "_")
        if key.startswith("no_") and key[3:] in OPTIONS and OPTIONS[key[3:]].kind.is_flag and isinstance(value, bool):
            key, value = key[3:], not value
        if key not in OPTIONS and key not in OTHER_HOSTS and key not in VLLM_FLAGS:
            raise OptionError(f"{path}: {name} is no option{_suggestion(key, '-')}")
        if value is not None:
            _take(found, key, value, f"{path}: {name}")


def _read_file(path: Path) -> dict[str, Any]:
    import yaml  # only where a file is given

    try:
        content = yaml.safe_load(path.read_text())  # YAML contains JSON
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from error
    except Exception as error:  # of a value that its tag, such as !!int, does not fit, yaml raises whatever comes
        raise OptionError(f"--config {path} is neither YAML nor JSON: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {path} holds a {type(content).__name__}, expected option names with values")
    return content


def _take_environment(found: OptionValues, environment: Mapping[str, str]) -> None:
    for variable, key in FOREIGN_VARIABLES.items():
        if environment.get(variable):
            _take(found, key, environment[variable], variable)
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in (*TOOL_VARIABLES, f"{ENVIRONMENT_PREFIX}CONFIG"):
            continue
        key = variable[len(ENVIRONMENT_PREFIX) :].lower()
        if key in OPTIONS or key in OTHER_HOSTS or key in VLLM_FLAGS:
            _take(found, key, value, variable)
        else:
            found.notes.append(f"environment variable {variable} is no option and is ignored{_suggestion(key, '_', str.upper)}")


def _take(found: OptionValues, key: str, value: Any, source: str) -> None:
    """Check one value, a text or what a YAML file holds, and keep it."""
    if key in OTHER_HOSTS:
        if value is not False:
            refuse_other_hosts(key, "" if value is True else _shortened(value), source)
        return
    if key not in OPTIONS:
        key = take_flag(key, value, source, found.notes)
        if not key:
            return
    kind = OPTIONS[key].kind
    value = translated(key, value, source, found.notes) if not isinstance(value, (list, dict)) else value
    parts = value if isinstance(value, list) else [value]
    if isinstance(value, dict) or (len(parts) != 1 and not kind.is_list):
        raise OptionError(f"{source}: {_shortened(value)} is not a single value")
    try:
        parsed = [kind.parse(str(part)) for part in parts]
    except ValueError as error:
        raise OptionError(f"{source} {_shortened(value)}: {error}") from None
    found.values[key] = tuple(item for items in parsed for item in items) if kind.is_list else parsed[0]
    found.given.add(key)
    if found.values[key] is None:  # what is worked out where nobody asks
        found.given.discard(key)


def _shortened(value: Any) -> str:
    try:
        text = str(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} letters)"


def _suggestion(key: str, separator: str, spell: Any = str) -> str:
    close = nearest(key, OPTIONS)
    prefix = ENVIRONMENT_PREFIX if spell is str.upper else ""
    return f"; did you mean {prefix}{spell(close.replace('_', separator))}?" if close else ""
