"""Handling of each flag of `vllm serve`: another name of our option, no effect, or rejected with the reason.

Data, read by `vllm.py` and `read.py`. A flag that is not listed has the same name and meaning as ours; flags for several hosts
are in `other_hosts.py`. `tests/engine/options/vllm_flags.json` has the flags of vLLM's two newest versions, read from its
wheels by `python -m tools.vllm_flags`; each must be known. Flags that vLLM has dropped stay here while recipes use them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Effect = Literal["alias", "none", "refused"]


class Fate(msgspec.Struct, frozen=True):
    """`text`: our option's name, or why the flag has no effect or is rejected."""

    effect: Effect
    text: str
    is_flag: bool = False  # it takes no value
    harmless: tuple[str, ...] = ()  # accepted values of a rejected flag, which match what the engine does
    takes_several: bool = False


def _alias(text: str, *, is_flag: bool = False) -> Fate:
    return Fate("alias", text, is_flag)


def _none(text: str) -> Fate:
    return Fate("none", text)


def _flag(text: str) -> Fate:
    return Fate("none", text, is_flag=True)


def _refused(text: str, *harmless: str, is_flag: bool = False) -> Fate:
    return Fate("refused", text, is_flag, harmless)


_KERNELS = "kernels are chosen by measurement (--cpu-kernels)"
_LOGS = "logs are written to the run directory (--log-level)"
_ALWAYS = "always enabled"
_STORED = "weights are used as the checkpoint stores them, quantized or not"
_COMPILE = "steps are recorded, not compiled (--plan)"
_TLS = "client certificates are not supported; use a proxy"
_TRANSFER = "moving a KV cache between engines is not supported"
_CODE = "loading external code is not supported"
_PLUGIN = "a parser is a package with an entry point in tokamak.parsers; name it with --plugins"
_LIMITS = "request headers are limited to 64 KiB and 100 fields"
_STATE = "states of recurrent layers are float32 and kept at ends of blocks (--state-cache-interval)"
_DEVICES = "it only applies to the GPU runner of vLLM"
_METRICS = "/metrics has all metrics"
_ENCODER = "the precision of encoders is set by --vision-quantization"
_READING = "weights are memory-mapped"
_OFFLOAD = "weights are mapped from a packed file that processes share, so there is no offloading"
_DP = "replicas belong to one engine, which supervises them"
_TIMEOUTS = "ranks stop waiting when another rank dies (--hang-timeout)"
_DRAFTS = "use --speculative-config, as in --speculative-config.method ngram"
_CONTEXTS = "context parallelism is not supported; remove it"

VLLM_FLAGS: dict[str, Fate] = {
    # another name
    "api_server_count": _alias("api_processes"),
    "kv_cache_memory_bytes": _alias("kv_cache_memory"),
    "num_gpu_blocks_override": _alias("num_kv_blocks"),
    "uvicorn_log_level": _alias("log_level"),
    "enable_log_requests": _alias("log_requests", is_flag=True),
    "all2all_backend": _refused("ranks exchange rows in shared memory; remove it", "allgather_reducescatter", "naive"),
    # without effect
    "trust_remote_code": _flag("code in checkpoints is never run"),
    "code_revision": _none("code in checkpoints is never run"),
    "tokenizer_mode": _refused("the tokenizer is detected from its file; remove it", "auto", "hf", "slow"),
    "config_format": _refused("only Hugging Face configurations are supported; remove it", "auto", "hf"),
    "model_impl": _refused("models are implemented by Tokamak; remove it", "auto", "vllm"),
    "task": _alias("runner"),
    "convert": _refused("use --runner pooling for embeddings and scores; remove it", "auto", "none"),
    "cpu_offload_gb": _refused("weights are already in CPU memory; remove it", "0", "0.0"),
    "swap_space": _none("preempted sequences are recomputed, not swapped"),
    "preemption_mode": _refused("preempted sequences are recomputed; remove it", "recompute"),
    "enforce_eager": _flag(_COMPILE),
    "compilation_config": _none(_COMPILE),
    "optimization_level": _none(_COMPILE),
    "cuda_graph_sizes": _none("use --cudagraph-capture-sizes"),
    "max_seq_len_to_capture": _none(_COMPILE),
    "attention_backend": _none(_KERNELS),
    "moe_backend": _none(_KERNELS),
    "disable_custom_all_reduce": _flag("ranks communicate through shared memory"),
    "disable_cascade_attn": _flag(_KERNELS),
    "use_tqdm_on_load": _flag("progress is shown in terminals only"),
    "enable_chunked_prefill": _flag(_ALWAYS),
    "async_scheduling": _flag("the next step is always scheduled ahead"),
    "scheduling_policy": _none("requests run by priority and arrival; use --no-request-priority to disable priorities"),
    "scheduler_cls": _refused(_CODE),
    "stream_interval": _refused("tokens are sent as soon as they are available; remove it", "1"),
    "prefix_caching_hash_algo": _none("blocks are identified by blake2b hashes of their tokens"),
    "enable_sleep_mode": _flag("use `tokamak ctl sleep` or /admin/sleep"),
    "enable_prompt_tokens_details": _flag(_ALWAYS),
    "enable_request_id_headers": _flag(_ALWAYS),
    "enable_server_load_tracking": _flag("the load is at /load"),
    "disable_log_requests": _flag("requests are logged only with --log-requests"),
    "enable_log_outputs": _flag("request text is never logged"),
    "enable_log_deltas": _flag("request text is never logged"),
    "disable_log_stats": _flag("counters have no cost; `tokamak top` shows them"),
    "aggregate_engine_logging": _flag(_LOGS),
    "log_config_file": _none(_LOGS),
    "log_error_stack": _flag(_LOGS),
    "max_log_len": _none("request text is never logged"),
    "disable_uvicorn_access_log": _flag(_LOGS),
    "disable_access_log_for_endpoints": _none(_LOGS),
    "disable_fastapi_docs": _flag("only /openapi.json is served"),
    "enable_offline_docs": _flag("only /openapi.json is served"),
    "disable_frontend_multiprocessing": _flag("HTTP always runs in separate processes (--api-processes)"),
    "enable_ssl_refresh": _flag("use `tokamak ctl restart api0` to read the certificate again"),
    "allowed_methods": _none("all methods of the API are allowed"),
    "allowed_headers": _none("all headers are allowed"),
    "allow_credentials": _flag("keys are sent in headers, cookies are not used"),
    "h11_max_incomplete_event_size": _none(_LIMITS),
    "h11_max_header_count": _none(_LIMITS),
    "shutdown_timeout": _none("open streams get a third of --stop-timeout"),
    "max_parallel_loading_workers": _none("ranks map packed weights"),
    "worker_cls": _refused(_CODE, "auto"),
    "worker_extension_cls": _refused(_CODE),
    "mm_encoder_tp_mode": _none("the encoder uses the parallelism of its ranks"),
    "mm_processor_cache_type": _none("pixels are kept in shared memory (--mm-processor-cache-gb)"),
    "skip_mm_profiling": _flag("there is no profiling at startup"),
    "chat_template_content_format": _none("the content format is detected from the template"),
    "exclude_tools_when_tool_choice_none": _flag(_ALWAYS),
    "fail_on_environ_validation": _flag("unknown environment variables are reported"),
    "hf_config_path": _refused("the configuration is config.json in the checkpoint; change it there"),
    # refused
    "download_dir": _refused("set HF_HOME to choose the directory of the Hugging Face cache"),
    "hf_token": _refused("set HF_TOKEN instead, which process lists do not show"),
    "hf_overrides": _refused("change config.json in the checkpoint"),
    "skip_tokenizer_init": _refused("a tokenizer is required; --load-format dummy works without one", "false", is_flag=True),
    "response_role": _refused("answers always have the role assistant; remove it", "assistant"),
    "return_tokens_as_token_ids": _refused("set return_tokens_as_token_ids in requests", is_flag=True),
    "enable_force_include_usage": _refused("set stream_options.include_usage in requests", is_flag=True),
    "enable_per_request_metrics": _refused("set `timings` in requests", is_flag=True),
    "enable_tokenizer_info_endpoint": _refused("not available; see prompts at /v1/chat/completions/render", is_flag=True),
    "logprobs_mode": _refused("log-probabilities are always those of the raw logits; remove it", "raw_logprobs"),
    "logits_processors": _refused(_CODE),
    "middleware": _refused(_CODE),
    "tool_parser_plugin": _refused(_PLUGIN),
    "reasoning_parser_plugin": _refused(_PLUGIN),
    "tool_server": _refused("tools run in the client"),
    "ssl_ca_certs": _refused(_TLS),
    "ssl_cert_reqs": _refused(_TLS, "0"),
    "ssl_ciphers": _refused("the ciphers are those of OpenSSL on this machine; remove it"),
    "kv_transfer_config": _refused(_TRANSFER),
    "ec_transfer_config": _refused(_TRANSFER),
    "kv_offloading_size": _refused("KV cache offloading is not supported"),
    "kv_events_config": _refused("KV events are always published; see --kv-events-endpoint"),
    "collect_detailed_traces": _refused("spans cover requests; use `tokamak trace` for steps and ops"),
    "calculate_kv_scales": _refused("int8 keys have their own scales, and fp8 is not supported", is_flag=True),
    "model_loader_extra_config": _refused("safetensors and GGUF files are memory-mapped; remove it", "{}"),
    "max_cpu_loras": _none("all adapters are in CPU memory (--max-loras)"),
    "fully_sharded_loras": _flag("ranks share the memory of adapters"),
    "specialize_active_lora": _flag("rows without an adapter have no cost"),
    "lora_dtype": _none("adapters are stored as float32"),
    "lora_extra_vocab_size": _none("adapters add no tokens"),
    "enable_lora_bias": _refused("biases in adapters are not supported", is_flag=True),
    "enable_tower_connector_lora": _refused("adapters for vision encoders are not supported", is_flag=True),
    "default_mm_loras": _refused("requests choose the adapter by its model name"),
    "ignore_patterns": _none("only the needed files of a repository are downloaded"),
    "enable_prompt_adapter": _refused("prompt adapters are not supported", is_flag=True),
    "disable_sliding_window": _flag("no supported model has a sliding window"),
    "decode_context_parallel_size": _refused("context parallelism is not supported; remove it", "1"),
    "enable_dbo": _refused("a rank runs one batch at a time", is_flag=True),
    "grpc": _refused("gRPC is not supported, use HTTP", is_flag=True),
    "tokens_only": _refused("the complete API is always served", is_flag=True),
    # flags of older versions that recipes still use
    "disable_async_output_proc": _flag("the next step is always scheduled ahead"),
    "disable_mm_preprocessor_cache": _flag("use --mm-processor-cache-gb 0"),
    "enable_multimodal_encoder_data_parallel": _flag("the encoder uses the parallelism of its ranks"),
    "enable_reasoning": _flag("use --reasoning-parser"),
    "engine_use_ray": _flag("ranks are processes on 1 host"),
    "full_cuda_graph": _flag(_COMPILE),
    "guided_decoding_backend": _none("llguidance handles every grammar"),
    "guided_decoding_disable_additional_properties": _flag("objects with properties never have additional ones by default"),
    "guided_decoding_disable_any_whitespace": _flag("set disable_any_whitespace of structured_outputs in requests"),
    "guided_decoding_disable_fallback": _flag("llguidance handles every grammar"),
    "long_lora_scaling_factors": _refused("adapters cannot extend the context"),
    "max_context_len_to_capture": _none(_COMPILE),
    "max_prompt_adapter_token": _refused("prompt adapters are not supported"),
    "max_prompt_adapters": _refused("prompt adapters are not supported"),
    "multi_step_stream_outputs": _flag("tokens are sent as soon as they are available"),
    "ngram_prompt_lookup_max": _refused(_DRAFTS),
    "ngram_prompt_lookup_min": _refused(_DRAFTS),
    "num_lookahead_slots": _none("blocks for draft tokens are allocated when needed"),
    "num_scheduler_steps": _refused("tokens are sent after every step; remove it", "1"),
    "override_pooler_config": _alias("pooler_config"),
    "prompt_adapters": _refused("prompt adapters are not supported"),
    "qlora_adapter_name_or_path": _refused("use --lora-modules"),
    "rope_scaling": _refused("change config.json in the checkpoint"),
    "rope_theta": _refused("change config.json in the checkpoint"),
    "scheduler_delay_factor": _refused("prompts are not delayed; remove it", "0", "0.0"),
    "num_speculative_tokens": _refused(_DRAFTS),
    "spec_decoding_acceptance_method": _refused(_DRAFTS),
    "speculative_disable_by_batch_size": _refused(_DRAFTS),
    "speculative_draft_tensor_parallel_size": _refused(_DRAFTS),
    "speculative_max_model_len": _refused(_DRAFTS),
    "speculative_model": _refused(_DRAFTS),
    "tokenizer_pool_extra_config": _none("tokenizers are processes (--tokenizer-processes)"),
    "tokenizer_pool_size": _alias("tokenizer_processes"),
    "tokenizer_pool_type": _none("tokenizers are processes (--tokenizer-processes)"),
    "use_v2_block_manager": _flag("there is only one block manager"),
    "worker_use_ray": _flag("ranks are processes on 1 host"),
    # flags of the newest versions
    "additional_config": _none("there are no plugins that use it"),
    "allow_deprecated_quantization": _flag(_STORED),
    "anthropic_disabled_thinking_effort": _none("requests set their reasoning effort"),
    "attention_config": _none(_KERNELS),
    "aux_output_config": _refused("answers have only tokens and log-probabilities", "{}"),
    "cohere_format": _none("the chat template defines the format of a conversation"),
    "cohere_is_reasoning_model": _flag("reasoning is detected by --reasoning-parser"),
    "cp_kv_cache_interleave_size": _refused(_CONTEXTS, "1"),
    "cpu_distributed_timeout_seconds": _none(_TIMEOUTS),
    "cpu_offload_params": _none(_OFFLOAD),
    "cudagraph_metrics": _flag(_METRICS),
    "custom_histogram_buckets": _refused("histogram buckets are fixed powers of two"),
    "data_parallel_multi_port_external_lb": Fate("refused", _DP, is_flag=True),
    "data_parallel_supervisor_port": _none(_DP),
    "dbo_decode_token_threshold": _none("a rank runs one batch at a time"),
    "dbo_prefill_token_threshold": _none("a rank runs one batch at a time"),
    "dcp_comm_backend": _refused(_CONTEXTS),
    "dcp_kv_cache_interleave_size": _refused(_CONTEXTS, "1"),
    "dcp_q_replicate": _refused(_CONTEXTS, is_flag=True),
    "device_ids": _refused("set CUDA_VISIBLE_DEVICES"),
    "device_memory_utilization": _alias("gpu_memory_utilization"),
    "diffusion_config": _refused("diffusion models are not supported"),
    "disable_hybrid_kv_cache_manager": _flag("all layers share one block table"),
    "disable_nccl_for_dp_synchronization": _flag("replicas synchronize through shared memory"),
    "distributed_timeout_seconds": _none(_TIMEOUTS),
    "dp_supervisor_probe_failure_threshold": _none(_DP),
    "dp_supervisor_probe_interval_s": _none(_DP),
    "dp_supervisor_probe_timeout_s": _none(_DP),
    "dp_sync_interval": _none("replicas that share experts synchronize in every step"),
    "ec_manager_config": _none("the cache of media features is sized by --encoder-cache-size"),
    "elastic_ep_max_dp_size": _refused("the number of replicas is fixed at startup; remove it"),
    "enable_batch_sharded_sampling": _flag("the threads of a rank share the sampling"),
    "enable_cumem_allocator": _flag(_DEVICES),
    "enable_elastic_ep": _refused("the number of replicas is fixed at startup; remove it", is_flag=True),
    "enable_ep_weight_filter": _flag("a rank only reads its own experts"),
    "enable_fault_tolerance": _flag("an actor that dies always restarts"),
    "enable_flash_late_interaction": _flag(_KERNELS),
    "enable_flashinfer_autotune": _flag(_KERNELS),
    "enable_hc_sp": _flag(_KERNELS),
    "enable_layerwise_nvtx_tracing": _flag("use `tokamak trace` to see the ops of a step"),
    "enable_logging_iteration_details": _flag("use `tokamak trace` to see steps"),
    "enable_mamba_cache_stochastic_rounding": _flag(_STATE),
    "enable_mamba_shared_prefix_checkpoint": _flag(_STATE),
    "enable_mfu_metrics": _flag(_METRICS),
    "enable_mixed_moe_lora_format": _refused("adapters for experts are not supported", is_flag=True),
    "enable_moe_shared_loras": _refused("adapters for experts are not supported", is_flag=True),
    "enable_nccl_comm_suspend": _flag(_DEVICES),
    "enable_prompt_embeds": _refused("prompts are text, tokens, images or image features", is_flag=True),
    "enable_return_routed_experts": _refused("answers do not include the experts that were used", is_flag=True),
    "enable_scale_out": _refused("an engine runs on 1 host", is_flag=True),
    "enable_shm_tensor_arena": _flag("arrays are always passed in shared memory"),
    "enable_trace_replay": _refused("replaying traces is not supported; use `tokamak bench` for load tests", is_flag=True),
    "engram_config": _refused("engram models are not supported"),
    "fault_tolerance_config": _none("use --restart-limit, --restart-window and --hang-timeout"),
    "fingerprint_mode": _refused("system_fingerprint is a hash of weights, kernels, precision and version", "full", "hash"),
    "fingerprint_value": _refused("system_fingerprint is a hash of weights, kernels, precision and version"),
    "gdn_prefill_backend": _none(_KERNELS),
    "grpc_port": _refused("gRPC is not supported, use HTTP"),
    "interleave_mm_strings": _flag("images always stay at their place in the conversation"),
    "io_processor_plugin": _refused(_CODE),
    "ir_op_priority": _none(_KERNELS),
    "jit_monitor_mode": _none("nothing is compiled while serving"),
    "jit_monitor_verbose": _flag("nothing is compiled while serving"),
    "kda_decode_backend": _none(_KERNELS),
    "kda_prefill_backend": _none(_KERNELS),
    "kernel_config": _none(_KERNELS),
    "kv_cache_dtype_skip_layers": _refused("all layers use the same KV cache precision"),
    "kv_cache_metrics": _flag(_METRICS),
    "kv_cache_metrics_sample": _none(_METRICS),
    "kv_offloading_backend": _none("KV cache offloading is not supported"),
    "kv_sharing_fast_prefill": _flag(_KERNELS),
    "linear_backend": _none(_KERNELS),
    "logging_config": _none(_LOGS),
    "long_prefill_token_threshold_adaptive": _flag("steps are limited by measured time (--max-step-time)"),
    "lora_target_modules": _none("the adapter defines which modules it changes"),
    "mamba_backend": _none(_STATE),
    "mamba_block_size": _alias("state_cache_interval"),
    "mamba_cache_dtype": _none(_STATE),
    "mamba_cache_mode": _none(_STATE),
    "mamba_cache_philox_rounds": _none(_STATE),
    "mamba_ssm_cache_dtype": _none(_STATE),
    "mamba_ssu_algorithm": _none(_STATE),
    "max_lora_cls_labels": _refused("adapters for classifiers are not supported"),
    "max_num_active_seqs": _alias("max_num_seqs"),
    "max_num_queued_reqs": _alias("max_waiting"),
    "max_num_queued_tokens": _refused("the queue is limited by requests, not tokens; use --max-waiting"),
    "max_num_scheduled_tokens": _alias("max_num_batched_tokens"),
    "mm_device_do_normalize": _flag("pixels are normalized by the media process"),
    "mm_encoder_attn_backend": _none(_KERNELS),
    "mm_encoder_attn_dtype": _none(_ENCODER),
    "mm_encoder_fp8_scale_path": _none(_ENCODER),
    "mm_encoder_fp8_scale_save_margin": _none(_ENCODER),
    "mm_encoder_fp8_scale_save_path": _none(_ENCODER),
    "mm_encoder_only": _refused("features are computed only for the engine's own answers", is_flag=True),
    "mm_hasher_algorithm": _none("media are identified by blake2b hashes of their bytes"),
    "mm_ipc_gpu_memory_gb": _none(_DEVICES),
    "mm_processor_device": _none("the media process decodes on the CPU"),
    "mm_shm_cache_max_object_size_mb": _none("limits are set by --max-media-bytes and --media-memory"),
    "mm_tensor_ipc": _none("pixels are always passed in shared memory"),
    "model_class_overrides": _refused("models are implemented by Tokamak; remove it", "{}"),
    "monokernel": _flag(_KERNELS),
    "numa_bind": _flag("ranks run on the NUMA node of their cores; see --bind-memory-nodes"),
    "numa_bind_cpus": _refused("use taskset, or --threads"),
    "numa_bind_nodes": _refused("use --bind-memory-nodes to bind ranks to NUMA nodes"),
    "offload_backend": _none(_OFFLOAD),
    "offload_group_size": _none(_OFFLOAD),
    "offload_num_in_group": _none(_OFFLOAD),
    "offload_params": _none(_OFFLOAD),
    "offload_prefetch_step": _none(_OFFLOAD),
    "per_request_spec_decode_metrics": _refused("usage always counts accepted draft tokens; remove it", "none"),
    "performance_mode": _none("there is one mode: running streams first, then prompts (--max-step-time)"),
    "prefill_context_parallel_size": _refused(_CONTEXTS, "1"),
    "prefill_schedule_interval": _refused("prompts always get a share of every step; remove it", "1"),
    "prefix_cache_retention_interval": _none("blocks stay cached until memory is needed (LRU)"),
    "prefix_match_unit": _none("prefixes are matched in units of --block-size tokens"),
    "profiler_config": _none("use `tokamak trace` to see steps"),
    "pt_load_map_location": _none(_READING),
    "quantization_config": _refused("quantization is set by the checkpoint and --quantization", "{}"),
    "ray_workers_use_nsight": _refused("ranks are processes on 1 host", is_flag=True),
    "reasoning_config": _none("--reasoning-parser knows the markers; requests set thinking_token_budget"),
    "reasoning_effort_map": _refused("reasoning_effort is passed to the chat template unchanged"),
    "renderer_num_workers": _alias("tokenizer_processes"),
    "replayssm_buffer_len": _none(_STATE),
    "return_sampling_mask": _refused("answers do not include the allowed tokens", is_flag=True),
    "safetensors_load_strategy": _none(_READING),
    "safetensors_prefetch_block_size": _none(_READING),
    "safetensors_prefetch_num_threads": _none(_READING),
    "scheduler_reserve_full_isl": _flag("an admitted prompt always has blocks for all its tokens"),
    "show_hidden_metrics_for_version": _none("no metric is hidden"),
    "sleep_mode_backend": _none("sleep drops the weights, wake maps them again"),
    "sleep_mode_offload_cudagraph": _flag("sleep drops the weights, wake maps them again"),
    "sleep_preserve_parameter_names": _none("sleep drops the weights, wake maps them again"),
    "sparse_indexer_topk_backend": _none(_KERNELS),
    "structured_outputs_config": _none("llguidance handles every grammar; reasoning is not constrained"),
    "swa_bounded_replay": _flag("no supported model has a sliding window"),
    "tool_strict_level": _none("requests mark tools as strict"),
    "trust_request_mm_kwargs": _flag("requests may set mm_processor_kwargs within the engine's limits"),
    "ubatch_size": _refused("a rank runs one batch at a time", "0", "1"),
    "use_fp64_gumbel": _flag("sampling depends on (seed, position) and is the same on every machine"),
    "use_replayssm": _flag(_STATE),
    "video_pruning_method": _none("all sampled frames of a video are used"),
    "video_pruning_rate": _refused("all sampled frames of a video are used; remove it", "0", "0.0"),
    "watchdog_config": _none("use --hang-timeout"),
    "watermark": _none("an admitted sequence always has its blocks"),
    "watermark_config": _refused("watermarks are not supported"),
    "weight_transfer_config": _refused("weights are reloaded from a path (`tokamak ctl reload`)"),
}

VALUES: dict[str, dict[str, tuple[str, str]]] = {  # option -> vLLM's value -> ours, and a note
    "dtype": {
        "half": ("bfloat16", "float16 is not supported; weights are converted to bfloat16"),
        "float16": ("bfloat16", "float16 is not supported; weights are converted to bfloat16"),
        "float": ("float32", ""),
    },
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "fp8", "gguf", "None"), ("none", _STORED)
    ),
    "runner": dict.fromkeys(("embed", "embedding", "score", "classify"), ("pooling", "")),
    "load_format": dict.fromkeys(("gguf", "fastsafetensors", "hf"), ("auto", "")),
    "log_level": {"critical": ("error", ""), "trace": ("debug", "")},
    "kv_cache_dtype": {
        "fp8": ("int8", "8-bit keys and values are stored as int8"),
        "fp8_e4m3": ("int8", "8-bit keys and values are stored as int8"),
    },
    "device": {"cuda": ("gpu", ""), "None": ("auto", "")},
}
