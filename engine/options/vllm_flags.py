"""What becomes of each flag of `vllm serve`: an option here under another name, no effect, or refused with the reason.

Data, read by `vllm.py` and `table.py`. A flag that is not here has the same name and meaning as ours; flags that spread an
engine over hosts are in `other_hosts.py`. `tests/engine/options/vllm_flags.json` has the flags of vLLM's two newest versions,
which `python -m tools.vllm_flags` reads from its wheels; each must be known. Flags that vLLM has dropped are here as long as
recipes have them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

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
_STATE = "state of recurrent layers: no model here has any yet"
_DEVICES = "it is about GPUs of vLLM's own runner"
_METRICS = "/metrics has what is measured here"
_ENCODER = "encoders run as --vision-quantization says"
_READING = "weights are read by mapping their files"
_OFFLOAD = "weights are mapped from a packed file that processes share, none are offloaded"
_DP = "replicas belong to one engine, which supervises them"
_TIMEOUTS = "waits between ranks end when a rank dies (--hang-timeout)"
_DRAFTS = "give --speculative-config, as in --speculative-config.method ngram"
_CONTEXTS = "ranks share heads, not contexts; leave it out"

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
    # those of older versions, in recipes that are still about
    "disable_async_output_proc": _flag("the next step is always scheduled ahead"),
    "disable_mm_preprocessor_cache": _flag("say --mm-processor-cache-gb 0"),
    "enable_multimodal_encoder_data_parallel": _flag("the encoder runs as its ranks do"),
    "enable_reasoning": _flag("--reasoning-parser says it"),
    "engine_use_ray": _flag("ranks are processes of 1 host"),
    "full_cuda_graph": _flag(_COMPILE),
    "guided_decoding_backend": _none("llguidance writes every grammar"),
    "guided_decoding_disable_additional_properties": _flag("an object that names its properties has no others"),
    "guided_decoding_disable_any_whitespace": _flag("requests say it: disable_any_whitespace of structured_outputs"),
    "guided_decoding_disable_fallback": _flag("llguidance writes every grammar"),
    "long_lora_scaling_factors": _refused("adapters do not lengthen the context"),
    "max_context_len_to_capture": _none(_COMPILE),
    "max_prompt_adapter_token": _refused("there are no prompt adapters"),
    "max_prompt_adapters": _refused("there are no prompt adapters"),
    "multi_step_stream_outputs": _flag("what comes is sent at once"),
    "ngram_prompt_lookup_max": _refused(_DRAFTS),
    "ngram_prompt_lookup_min": _refused(_DRAFTS),
    "num_lookahead_slots": _none("blocks for drafts are taken as they are needed"),
    "num_scheduler_steps": _refused("a token is sent when its step ends; leave it out", "1"),
    "override_pooler_config": _alias("pooler_config"),
    "prompt_adapters": _refused("there are no prompt adapters"),
    "qlora_adapter_name_or_path": _refused("give the adapter to --lora-modules"),
    "rope_scaling": _refused("change the checkpoint's config.json"),
    "rope_theta": _refused("change the checkpoint's config.json"),
    "scheduler_delay_factor": _refused("prompts do not wait for others; leave it out", "0", "0.0"),
    "num_speculative_tokens": _refused(_DRAFTS),
    "spec_decoding_acceptance_method": _refused(_DRAFTS),
    "speculative_disable_by_batch_size": _refused(_DRAFTS),
    "speculative_draft_tensor_parallel_size": _refused(_DRAFTS),
    "speculative_max_model_len": _refused(_DRAFTS),
    "speculative_model": _refused(_DRAFTS),
    "tokenizer_pool_extra_config": _none("tokenizers are processes (--tokenizer-processes)"),
    "tokenizer_pool_size": _alias("tokenizer_processes"),
    "tokenizer_pool_type": _none("tokenizers are processes (--tokenizer-processes)"),
    "use_v2_block_manager": _flag("there is one"),
    "worker_use_ray": _flag("ranks are processes of 1 host"),
    # those of the newest versions
    "additional_config": _none("there are no plugins that would read it"),
    "allow_deprecated_quantization": _flag(_STORED),
    "anthropic_disabled_thinking_effort": _none("thinking is what the request says"),
    "attention_config": _none(_KERNELS),
    "aux_output_config": _refused("answers carry tokens and log-probabilities alone", "{}"),
    "cohere_format": _none("the chat template says how a conversation is written"),
    "cohere_is_reasoning_model": _flag("--reasoning-parser says whether a model thinks"),
    "cp_kv_cache_interleave_size": _refused(_CONTEXTS, "1"),
    "cpu_distributed_timeout_seconds": _none(_TIMEOUTS),
    "cpu_offload_params": _none(_OFFLOAD),
    "cudagraph_metrics": _flag(_METRICS),
    "custom_histogram_buckets": _refused("histograms have fixed buckets, powers of two"),
    "data_parallel_multi_port_external_lb": Fate("refused", _DP, is_flag=True),
    "data_parallel_supervisor_port": _none(_DP),
    "dbo_decode_token_threshold": _none("a rank runs one batch at a time"),
    "dbo_prefill_token_threshold": _none("a rank runs one batch at a time"),
    "dcp_comm_backend": _refused(_CONTEXTS),
    "dcp_kv_cache_interleave_size": _refused(_CONTEXTS, "1"),
    "dcp_q_replicate": _refused(_CONTEXTS, is_flag=True),
    "device_ids": _refused("set CUDA_VISIBLE_DEVICES"),
    "device_memory_utilization": _alias("gpu_memory_utilization"),
    "diffusion_config": _refused("no model here generates by diffusion"),
    "disable_hybrid_kv_cache_manager": _flag("all layers share one block table"),
    "disable_nccl_for_dp_synchronization": _flag("replicas meet in shared memory"),
    "distributed_timeout_seconds": _none(_TIMEOUTS),
    "dp_supervisor_probe_failure_threshold": _none(_DP),
    "dp_supervisor_probe_interval_s": _none(_DP),
    "dp_supervisor_probe_timeout_s": _none(_DP),
    "dp_sync_interval": _none("replicas that share experts meet in each step"),
    "ec_manager_config": _none("features of media are kept as --encoder-cache-size says"),
    "elastic_ep_max_dp_size": _refused("the number of replicas is fixed at the start; leave it out"),
    "enable_batch_sharded_sampling": _flag("sampling is shared by the threads of a rank"),
    "enable_cumem_allocator": _flag(_DEVICES),
    "enable_elastic_ep": _refused("the number of replicas is fixed at the start; leave it out", is_flag=True),
    "enable_ep_weight_filter": _flag("a rank reads the experts that it has, always"),
    "enable_fault_tolerance": _flag("an actor that dies is started again, always"),
    "enable_flash_late_interaction": _flag(_KERNELS),
    "enable_flashinfer_autotune": _flag(_KERNELS),
    "enable_hc_sp": _flag(_KERNELS),
    "enable_layerwise_nvtx_tracing": _flag("`tokamak trace` shows the ops of a step"),
    "enable_logging_iteration_details": _flag("`tokamak trace` shows the steps"),
    "enable_mamba_cache_stochastic_rounding": _flag(_STATE),
    "enable_mamba_shared_prefix_checkpoint": _flag(_STATE),
    "enable_mfu_metrics": _flag(_METRICS),
    "enable_mixed_moe_lora_format": _refused("adapters of experts are not served", is_flag=True),
    "enable_moe_shared_loras": _refused("adapters of experts are not served", is_flag=True),
    "enable_nccl_comm_suspend": _flag(_DEVICES),
    "enable_prompt_embeds": _refused("prompts are texts, tokens, pictures or features of pictures", is_flag=True),
    "enable_return_routed_experts": _refused("answers do not say which experts were used", is_flag=True),
    "enable_scale_out": _refused("an engine is of 1 host", is_flag=True),
    "enable_shm_tensor_arena": _flag("arrays always travel in shared memory"),
    "enable_trace_replay": _refused("there is no replay of traces; `tokamak bench` makes load", is_flag=True),
    "engram_config": _refused("no model here has an engram"),
    "fault_tolerance_config": _none("--restart-limit, --restart-window and --hang-timeout say it"),
    "fingerprint_mode": _refused("system_fingerprint is the hash of weights, kernels, precision and version", "full", "hash"),
    "fingerprint_value": _refused("system_fingerprint is the hash of weights, kernels, precision and version"),
    "gdn_prefill_backend": _none(_KERNELS),
    "grpc_port": _refused("there is HTTP alone"),
    "interleave_mm_strings": _flag("pictures stand where the conversation has them, always"),
    "io_processor_plugin": _refused(_CODE),
    "ir_op_priority": _none(_KERNELS),
    "jit_monitor_mode": _none("nothing is compiled while it serves"),
    "jit_monitor_verbose": _flag("nothing is compiled while it serves"),
    "kda_decode_backend": _none(_KERNELS),
    "kda_prefill_backend": _none(_KERNELS),
    "kernel_config": _none(_KERNELS),
    "kv_cache_dtype_skip_layers": _refused("all layers keep keys and values in one precision"),
    "kv_cache_metrics": _flag(_METRICS),
    "kv_cache_metrics_sample": _none(_METRICS),
    "kv_offloading_backend": _none("the KV cache has one tier"),
    "kv_sharing_fast_prefill": _flag(_KERNELS),
    "linear_backend": _none(_KERNELS),
    "logging_config": _none(_LOGS),
    "long_prefill_token_threshold_adaptive": _flag("steps are bounded by measured time (--max-step-time)"),
    "lora_target_modules": _none("an adapter says itself which modules it changes"),
    "mamba_backend": _none(_STATE),
    "mamba_block_size": _none(_STATE),
    "mamba_cache_dtype": _none(_STATE),
    "mamba_cache_mode": _none(_STATE),
    "mamba_cache_philox_rounds": _none(_STATE),
    "mamba_ssm_cache_dtype": _none(_STATE),
    "mamba_ssu_algorithm": _none(_STATE),
    "max_lora_cls_labels": _refused("adapters of classifiers are not served"),
    "max_num_active_seqs": _alias("max_num_seqs"),
    "max_num_queued_reqs": _alias("max_waiting"),
    "max_num_queued_tokens": _refused("waiting requests are counted, not their tokens: --max-waiting"),
    "max_num_scheduled_tokens": _alias("max_num_batched_tokens"),
    "mm_device_do_normalize": _flag("pixels are normalized by the media process"),
    "mm_encoder_attn_backend": _none(_KERNELS),
    "mm_encoder_attn_dtype": _none(_ENCODER),
    "mm_encoder_fp8_scale_path": _none(_ENCODER),
    "mm_encoder_fp8_scale_save_margin": _none(_ENCODER),
    "mm_encoder_fp8_scale_save_path": _none(_ENCODER),
    "mm_encoder_only": _refused("an engine answers; features are computed for its own answers", is_flag=True),
    "mm_hasher_algorithm": _none("media are named by blake2b over their bytes"),
    "mm_ipc_gpu_memory_gb": _none(_DEVICES),
    "mm_processor_device": _none("the media process decodes on the CPU"),
    "mm_shm_cache_max_object_size_mb": _none("--max-media-bytes and --media-memory bound it"),
    "mm_tensor_ipc": _none("pixels always travel in shared memory"),
    "model_class_overrides": _refused("models are our own; leave it out", "{}"),
    "monokernel": _flag(_KERNELS),
    "numa_bind": _flag("ranks run on the memory node of their cores; see --bind-memory-nodes"),
    "numa_bind_cpus": _refused("use taskset, or --threads"),
    "numa_bind_nodes": _refused("--bind-memory-nodes says whether ranks keep to a node"),
    "offload_backend": _none(_OFFLOAD),
    "offload_group_size": _none(_OFFLOAD),
    "offload_num_in_group": _none(_OFFLOAD),
    "offload_params": _none(_OFFLOAD),
    "offload_prefetch_step": _none(_OFFLOAD),
    "per_request_spec_decode_metrics": _refused("usage counts accepted draft tokens; leave it out", "none"),
    "performance_mode": _none("one mode serves both: streams first, prompts in what is left (--max-step-time)"),
    "prefill_context_parallel_size": _refused(_CONTEXTS, "1"),
    "prefill_schedule_interval": _refused("prompts have their share of every step; leave it out", "1"),
    "prefix_cache_retention_interval": _none("blocks stay until their memory is needed, least recently used first"),
    "prefix_match_unit": _none("prefixes are matched by --block-size tokens"),
    "profiler_config": _none("`tokamak trace` shows the steps"),
    "pt_load_map_location": _none(_READING),
    "quantization_config": _refused("the checkpoint and --quantization say it", "{}"),
    "ray_workers_use_nsight": _refused("ranks are processes of 1 host", is_flag=True),
    "reasoning_config": _none("--reasoning-parser knows the markers; requests give a thinking_token_budget"),
    "reasoning_effort_map": _refused("reasoning_effort goes to the chat template as it is"),
    "renderer_num_workers": _alias("tokenizer_processes"),
    "replayssm_buffer_len": _none(_STATE),
    "return_sampling_mask": _refused("answers do not say which tokens were allowed", is_flag=True),
    "safetensors_load_strategy": _none(_READING),
    "safetensors_prefetch_block_size": _none(_READING),
    "safetensors_prefetch_num_threads": _none(_READING),
    "scheduler_reserve_full_isl": _flag("a prompt that is let in has blocks for all its tokens, always"),
    "show_hidden_metrics_for_version": _none("no metric is hidden"),
    "sleep_mode_backend": _none("sleep drops the weights, wake maps them again"),
    "sleep_mode_offload_cudagraph": _flag("sleep drops the weights, wake maps them again"),
    "sleep_preserve_parameter_names": _none("sleep drops the weights, wake maps them again"),
    "sparse_indexer_topk_backend": _none(_KERNELS),
    "structured_outputs_config": _none("llguidance writes every grammar; thinking is left free"),
    "swa_bounded_replay": _flag("no model here has a sliding window"),
    "tool_strict_level": _none("a tool is strict where its request says so"),
    "trust_request_mm_kwargs": _flag("requests may set mm_processor_kwargs within the engine's limits"),
    "ubatch_size": _refused("a rank runs one batch at a time", "0", "1"),
    "use_fp64_gumbel": _flag("tokens are drawn by (seed, position), alike on every machine"),
    "use_replayssm": _flag(_STATE),
    "video_pruning_method": _none("no frame of a video is dropped after sampling"),
    "video_pruning_rate": _refused("no frame of a video is dropped after sampling; leave it out", "0", "0.0"),
    "watchdog_config": _none("--hang-timeout says it"),
    "watermark": _none("an admitted sequence has its blocks, and each running one finds another"),
    "watermark_config": _refused("answers carry no watermark"),
    "weight_transfer_config": _refused("weights are reloaded from a path (`tokamak ctl reload`)"),
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
