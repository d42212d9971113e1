"""What becomes of the flags of `vllm serve`: each is an option here, another name for one, without effect, or refused with the
reason. Used by `engine/options/table.py`; `tokamak serve --vllm-flags` prints the table.

Flags that are not here have the same name and meaning as ours. Those that spread an engine over hosts are in `other_hosts.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from engine.errors import OptionError

Effect = Literal["alias", "none", "refused"]


class Fate(msgspec.Struct, frozen=True):
    """`text`: the option that it is another name for; or why it has no effect, or is refused."""

    effect: Effect
    text: str
    is_flag: bool = False  # it takes no value
    harmless: tuple[str, ...] = ()  # values that ask for what there is, of what is refused otherwise


def _alias(text: str, *, is_flag: bool = False) -> Fate:
    return Fate("alias", text, is_flag)


def _none(text: str) -> Fate:
    return Fate("none", text)


def _flag(text: str) -> Fate:
    return Fate("none", text, is_flag=True)


def _refused(text: str, *harmless: str, is_flag: bool = False) -> Fate:
    return Fate("refused", text, is_flag, harmless)


_KERNELS = "kernels are chosen by what was timed here (--cpu-kernels)"
_LOGS = "logs are in the run's directory (--log-level)"
_ALWAYS = "it is always so"
_STORED = "weights are kept as the checkpoint has them, quantized or not"
_COMPILE = "steps are recorded, not compiled (--plan)"
_TLS = "clients show no certificates; put a proxy before the server"
_TRANSFER = "a KV cache is not moved between engines yet"
_CODE = "no code is loaded from outside"
_LIMITS = "heads of at most 64 KiB and 100 fields are taken"

VLLM_FLAGS: dict[str, Fate] = {
    # another name
    "api_server_count": _alias("api_processes"),
    "kv_cache_memory_bytes": _alias("kv_cache_memory"),
    "num_gpu_blocks_override": _alias("num_kv_blocks"),
    "uvicorn_log_level": _alias("log_level"),
    "enable_log_requests": _alias("log_requests", is_flag=True),
    "all2all_backend": _refused("ranks exchange rows in shared memory; leave it out", "allgather_reducescatter", "naive"),
    # without effect
    "trust_remote_code": _flag("no code of a checkpoint is ever run"),
    "code_revision": _none("no code of a checkpoint is ever run"),
    "tokenizer_mode": _refused("the tokenizer's file says what it is; leave it out", "auto", "hf", "slow"),
    "config_format": _refused("configurations are Hugging Face's; leave it out", "auto", "hf"),
    "model_impl": _refused("models are our own; leave it out", "auto", "vllm"),
    "task": _alias("runner"),
    "convert": _refused("--runner pooling makes vectors and scores; leave it out", "auto", "none"),
    "cpu_offload_gb": _refused("weights lie in the machine's memory; leave it out", "0", "0.0"),
    "swap_space": _none("what is preempted is computed again, nothing is swapped"),
    "preemption_mode": _refused("what is preempted is computed again; leave it out", "recompute"),
    "enforce_eager": _flag(_COMPILE),
    "compilation_config": _none(_COMPILE),
    "optimization_level": _none(_COMPILE),
    "cuda_graph_sizes": _none("they are --cudagraph-capture-sizes"),
    "max_seq_len_to_capture": _none(_COMPILE),
    "attention_backend": _none(_KERNELS),
    "moe_backend": _none(_KERNELS),
    "disable_custom_all_reduce": _flag("ranks meet in shared memory"),
    "disable_cascade_attn": _flag(_KERNELS),
    "use_tqdm_on_load": _flag("progress is shown on a terminal"),
    "enable_chunked_prefill": _flag(_ALWAYS),
    "async_scheduling": _flag("the next step is always scheduled ahead"),
    "scheduling_policy": _none("requests run by priority and arrival; --no-request-priority takes none from them"),
    "scheduler_cls": _refused(_CODE),
    "stream_interval": _refused("what comes is sent at once; leave it out", "1"),
    "prefix_caching_hash_algo": _none("blocks are named by blake2b over their tokens"),
    "enable_sleep_mode": _flag("`tokamak ctl sleep`, /admin/sleep"),
    "enable_prompt_tokens_details": _flag(_ALWAYS),
    "enable_request_id_headers": _flag(_ALWAYS),
    "enable_server_load_tracking": _flag("it is at /load"),
    "disable_log_requests": _flag("they are not, unless --log-requests is given"),
    "enable_log_outputs": _flag("no text of a request is logged"),
    "enable_log_deltas": _flag("no text of a request is logged"),
    "disable_log_stats": _flag("counters cost nothing, `tokamak top` shows them"),
    "aggregate_engine_logging": _flag(_LOGS),
    "log_config_file": _none(_LOGS),
    "log_error_stack": _flag(_LOGS),
    "max_log_len": _none("no text of a request is logged"),
    "disable_uvicorn_access_log": _flag(_LOGS),
    "disable_access_log_for_endpoints": _none(_LOGS),
    "disable_fastapi_docs": _flag("there is /openapi.json alone"),
    "enable_offline_docs": _flag("there is /openapi.json alone"),
    "disable_frontend_multiprocessing": _flag("HTTP has processes of its own (--api-processes)"),
    "enable_ssl_refresh": _flag("`tokamak ctl restart api0` reads the certificate anew"),
    "allowed_methods": _none("all that the API has are allowed"),
    "allowed_headers": _none("all are allowed"),
    "allow_credentials": _flag("keys travel in headers, there are no cookies"),
    "h11_max_incomplete_event_size": _none(_LIMITS),
    "h11_max_header_count": _none(_LIMITS),
    "shutdown_timeout": _none("open streams may end within a third of --stop-timeout"),
    "max_parallel_loading_workers": _none("ranks map packed weights"),
    "worker_cls": _refused(_CODE, "auto"),
    "worker_extension_cls": _refused(_CODE),
    "mm_encoder_tp_mode": _none("the encoder runs as its ranks do"),
    "mm_processor_cache_type": _none("pixels are kept in shared memory (--mm-processor-cache-gb)"),
    "skip_mm_profiling": _flag("nothing is profiled"),
    "chat_template_content_format": _none("what a template takes is found out by trying"),
    "exclude_tools_when_tool_choice_none": _flag(_ALWAYS),
    "fail_on_environ_validation": _flag("unknown variables are noted"),
    "hf_config_path": _refused("the configuration is the checkpoint's config.json; change it there"),
    # refused
    "download_dir": _refused("set HF_HOME to the directory of the hub's cache"),
    "hf_token": _refused("set HF_TOKEN: others see arguments"),
    "hf_overrides": _refused("change the checkpoint's config.json"),
    "skip_tokenizer_init": _refused("texts need a tokenizer; --load-format dummy does without", "false", is_flag=True),
    "response_role": _refused("answers are the assistant's; leave it out", "assistant"),
    "return_tokens_as_token_ids": _refused("requests say it, in the field of that name", is_flag=True),
    "enable_force_include_usage": _refused("requests ask for it, in stream_options", is_flag=True),
    "enable_per_request_metrics": _refused("requests ask for them, by `timings`", is_flag=True),
    "enable_tokenizer_info_endpoint": _refused("there is none; /v1/chat/completions/render shows prompts", is_flag=True),
    "logprobs_mode": _refused("log-probabilities are of the raw logits; leave it out", "raw_logprobs"),
    "logits_processors": _refused(_CODE),
    "middleware": _refused(_CODE),
    "tool_parser_plugin": _refused(_CODE),
    "reasoning_parser_plugin": _refused(_CODE),
    "tool_server": _refused("tools run at the client"),
    "ssl_ca_certs": _refused(_TLS),
    "ssl_cert_reqs": _refused(_TLS, "0"),
    "ssl_ciphers": _refused("TLS takes the ciphers of the machine's OpenSSL; leave it out"),
    "kv_transfer_config": _refused(_TRANSFER),
    "ec_transfer_config": _refused(_TRANSFER),
    "kv_offloading_size": _refused("the KV cache has one tier"),
    "kv_events_config": _refused("KV events are always published, at --kv-events-endpoint"),
    "collect_detailed_traces": _refused("spans are of requests; `tokamak trace` has steps and ops"),
    "calculate_kv_scales": _refused("int8 keys have scales of their own; fp8 is not kept", is_flag=True),
    "model_loader_extra_config": _refused("weights are safetensors or GGUF, read by mapping; leave it out", "{}"),
    "max_cpu_loras": _none("all adapters lie in the machine's memory (--max-loras)"),
    "fully_sharded_loras": _flag("ranks share the memory of adapters"),
    "specialize_active_lora": _flag("rows without an adapter cost nothing"),
    "lora_dtype": _none("adapters are kept as float32"),
    "lora_extra_vocab_size": _none("adapters add no tokens"),
    "enable_lora_bias": _refused("adapters have no biases here", is_flag=True),
    "enable_tower_connector_lora": _refused("encoders of pictures have no adapters here", is_flag=True),
    "default_mm_loras": _refused("requests name the adapter that they want"),
    "ignore_patterns": _none("folders of a repository are never downloaded"),
    "enable_prompt_adapter": _refused("there are no prompt adapters", is_flag=True),
    "disable_sliding_window": _flag("no model here has one"),
    "decode_context_parallel_size": _refused("ranks share heads, not contexts; leave it out", "1"),
    "enable_dbo": _refused("a rank runs one batch at a time", is_flag=True),
    "grpc": _refused("there is HTTP alone", is_flag=True),
    "tokens_only": _refused("the whole API is there", is_flag=True),
}

VALUES: dict[str, dict[str, tuple[str, str]]] = {  # option -> value of vLLM's -> ours, and what to say of it
    "dtype": {
        "half": ("bfloat16", "kernels take no float16; weights are kept as bfloat16"),
        "float16": ("bfloat16", "kernels take no float16; weights are kept as bfloat16"),
        "float": ("float32", ""),
    },
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "fp8", "gguf", "auto", "None"), ("none", _STORED)
    ),
    "runner": dict.fromkeys(("embed", "embedding", "score", "classify"), ("pooling", "")),
    "load_format": dict.fromkeys(("gguf", "fastsafetensors", "hf"), ("auto", "")),
    "log_level": {"critical": ("error", ""), "trace": ("debug", "")},
    "kv_cache_dtype": {"fp8": ("int8", "8 bits of a key or value are int8"), "fp8_e4m3": ("int8", "8 bits are int8")},
    "device": {"cuda": ("gpu", ""), "None": ("auto", "")},
}

SHORT = {
    "-asc": "--api-processes",
    "-q": "--quantization",
    "-pp": "--pipeline-parallel-size",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
}
_LONG = re.compile(r"--(?P<name>[A-Za-z][\w-]*)(?P<path>(?:\.[\w+-]+)*)(?P<value>=.*)?", re.DOTALL)
_LEVEL = re.compile(r"-O\.?[a-z]*=?\d")


def spelled(arguments: Sequence[str]) -> list[str]:
    """A command line as our parser reads it: underscores in names become hyphens, `--option.key value` becomes JSON."""
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        match = _LONG.fullmatch(argument)
        if argument == "--":
            return [*found, argument, *rest]
        if match is None or (match["path"] and match["name"].startswith("no-")):
            level = f"--compilation-config={argument[2:]}"
            found.append(level if _LEVEL.fullmatch(argument) else SHORT.get(argument, argument))
            continue
        name = match["name"].replace("_", "-")
        if not match["path"]:
            found.append(f"--{name}{match['value'] or ''}")
            continue
        value = next(rest, "") if match["value"] is None else match["value"][1:]
        if name not in objects:
            objects[name] = {}
            found.append(f"--{name}=")
        _put(objects[name], match["path"][1:].split("."), value)
    return [_filled(argument, objects) for argument in found]


def _filled(argument: str, objects: dict[str, dict[str, Any]]) -> str:
    value = objects.get(argument[2:-1]) if argument.endswith("=") else None
    return argument if value is None else argument + json.dumps(value)


def _put(target: dict[str, Any], path: list[str], value: str) -> None:
    """`a.b` is a member of a member, `a+` the next elements of a list."""
    *parents, last = path
    for name in parents:
        target = target.setdefault(name, {})
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    if last.endswith("+"):
        more = value.split(",") if parsed is value else [parsed]
        target.setdefault(last[:-1], []).extend(more)
    else:
        target[last] = parsed


def take_flag(key: str, value: Any, source: str, notes: list[str]) -> str:
    """The option that a flag is another name for; empty where it has no effect, which is noted. OptionError: it is refused."""
    fate = VLLM_FLAGS[key]
    if fate.effect == "alias":
        return fate.text
    if fate.effect == "none":
        notes.append(f"{source} without effect: {fate.text}")
    elif _text(value) not in fate.harmless and value is not False:
        raise OptionError(f"{source} {_text(value)}".rstrip() + f": {fate.text}")
    return ""


def _text(value: Any) -> str:
    """Of a value of a file too, which may be a number of any length or a list."""
    if value is True:
        return ""
    return str(value) if isinstance(value, (str, float)) or (isinstance(value, int) and abs(value) < 1 << 53) else "..."


def translated(key: str, value: Any, source: str, notes: list[str]) -> Any:
    """A value of vLLM's as ours."""
    ours, note = VALUES.get(key, {}).get(value if isinstance(value, str) else "", (value, ""))
    if note:
        notes.append(f"{source} {value}: {note}")
    return ours


def table(own: Iterable[str]) -> str:
    """All flags with their fates, as Markdown. `own`: our options, of which those that vLLM has mean the same."""
    words = {"alias": "is", "none": "no effect", "refused": "refused"}
    rows = [f"| `--{key.replace('_', '-')}` | ours | |" for key in own]
    for key, fate in VLLM_FLAGS.items():
        text = f"`--{fate.text.replace('_', '-')}`" if fate.effect == "alias" else fate.text
        text += f" ({', '.join(fate.harmless)} will do)" if fate.harmless else ""
        rows.append(f"| `--{key.replace('_', '-')}` | {words[fate.effect]} | {text} |")
    return "\n".join(["| flag of `vllm serve` | | |", "|---|---|---|", *sorted(rows)])
