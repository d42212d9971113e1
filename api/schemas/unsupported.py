"""Fields of other servers' chats and completions that would change an answer but are not supported here: a request with one is
rejected with an alternative, instead of ignoring the field.

Called by the routes with a raw body, after its own fields are checked. Null is ignored, and so is a value that means the same
as leaving the field out, or as an equal field that both kinds of bodies have here: clients of many servers send both names
(SillyTavern: n_predict and max_tokens).
"""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.requests import invalid, shown


class Unsupported(msgspec.Struct, frozen=True):
    remedy: str
    asks_nothing: tuple[Any, ...] = ()
    same_as: str = ""  # a supported field that may have the same meaning
    negatives_ask: bool = True  # false: any negative number is ignored
    beside: tuple[tuple[str, Any], ...] = ()  # it only has an effect if one of these fields has another value than this


PENALTIES = (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))
FIELDS = {
    # OpenAI's
    "audio": Unsupported("only text answers are supported"),
    "function_call": Unsupported("send tool_choice", ("none", "auto")),
    "functions": Unsupported("send tools", ([],)),
    "modalities": Unsupported("only text answers are supported", ([], ["text"])),
    "verbosity": Unsupported("describe the desired length in a message", ("medium",)),
    "web_search_options": Unsupported("web search is not supported"),
    # vLLM's and SGLang's
    "custom_logit_processor": Unsupported("they are not supported", ("",)),
    "custom_params": Unsupported("logits processors are not supported", ({},)),
    "ebnf": Unsupported("send structured_outputs with a grammar", ("",)),
    "input_embeds": Unsupported("send text or token ids", ([],)),
    "input_ids": Unsupported("send prompt to /v1/completions", ([],)),
    "logits_processors": Unsupported("they are not supported", ([],)),
    "lora_path": Unsupported("send an adapter's name as model", ("", [])),
    "no_stop_trim": Unsupported("send include_stop_str_in_output", (False,)),
    "prompt_embeds": Unsupported("send text or token ids", ("", [])),
    "regex": Unsupported("send structured_outputs with a regex", ("",)),
    "return_hidden_states": Unsupported("hidden states are not stored; use an embedding model at /v1/embeddings", (False,)),
    "return_prompt_token_ids": Unsupported("send return_token_ids", (False,)),
    "return_routed_experts": Unsupported("expert choices are not stored", (False,)),
    "session_params": Unsupported("send the whole conversation; its prefix is cached", ({},)),
    "spaces_between_special_tokens": Unsupported("remove it", (True,)),
    "stop_regex": Unsupported("send stop", ("", [])),
    "stream_reasoning": Unsupported("reasoning is returned as generated; send include_reasoning false to hide it", (True,)),
    "use_beam_search": Unsupported("send n and best_of", (False,)),
    "vllm_xargs": Unsupported("remove it", ({},)),
    # llama.cpp's
    # SillyTavern sends -0.01 with every request
    "adaptive_target": Unsupported("send typical_p or top_p", negatives_ask=False),
    "dynatemp_range": Unsupported("send temperature", (0,)),
    "grammar": Unsupported("send structured_outputs with a grammar", ("",)),
    "image_data": Unsupported("send messages with image_url", ([],)),
    "json_schema": Unsupported("send response_format"),
    "lora": Unsupported("send an adapter's name as model", ([],)),
    "min_keep": Unsupported("use top_p, min_p or typical_p with a larger value", (0, 1)),
    "mirostat": Unsupported("send typical_p or top_p", (0,)),
    "n_cmpl": Unsupported("send n", (1,), "n"),
    "n_indent": Unsupported("send structured_outputs with a grammar", (0,)),
    "n_predict": Unsupported("send max_tokens", (-1,), "max_tokens"),
    "n_probs": Unsupported("send logprobs", (0,), "logprobs"),
    "post_sampling_probs": Unsupported("log-probabilities are computed before sampling", (False,)),
    "reasoning_in_content": Unsupported("send separate_reasoning false", (False,)),
    "repeat_last_n": Unsupported("repetition penalties always count all tokens; send -1", (-1,), beside=PENALTIES),
    "repeat_penalty": Unsupported("send repetition_penalty", (1,), "repetition_penalty"),
    "response_fields": Unsupported("all fields are always sent", ([],)),
    "return_tokens": Unsupported("send return_token_ids", (False,), "return_token_ids"),
    "samplers": Unsupported("the order of samplers is fixed; disable the others instead"),
    "system_prompt": Unsupported("send it as a message", ("",)),
    "t_max_predict_ms": Unsupported("send timeout, in seconds", (0, -1)),
    "thinking_forced_open": Unsupported("send chat_template_kwargs", (False,)),
    # of transformers, and of servers around it
    "adapter_id": Unsupported("send an adapter's name as model", ("",)),
    "do_sample": Unsupported("send temperature 0", (True,)),
    "encoder_no_repeat_ngram_size": Unsupported("send dry_multiplier", (0,)),
    "epsilon_cutoff": Unsupported("send min_p", (0,)),
    "eta_cutoff": Unsupported("send typical_p", (0,)),
    "guidance_scale": Unsupported("classifier-free guidance is not supported", (1,)),
    "max_new_tokens": Unsupported("send max_tokens", (), "max_tokens"),
    "min_new_tokens": Unsupported("send min_tokens", (0,), "min_tokens"),
    "mirostat_mode": Unsupported("send typical_p or top_p", (0,)),
    "negative_prompt": Unsupported("classifier-free guidance is not supported", ("",)),
    "no_repeat_ngram_size": Unsupported("send dry_multiplier and dry_allowed_length", (0,)),
    "num_beams": Unsupported("send n and best_of", (1,)),
    "penalty_alpha": Unsupported("send typical_p or top_p", (0,)),
    "return_full_text": Unsupported("send echo", (False,)),
    "smoothing_factor": Unsupported("send temperature", (0,)),
    "tfs": Unsupported("send typical_p or top_p", (1,)),
    "tfs_z": Unsupported("send typical_p or top_p", (1,)),
    "top_a": Unsupported("send min_p", (0,)),
    "watermark": Unsupported("it is not supported", (False,)),
    # of hosted models
    "enable_thinking": Unsupported("send reasoning_effort, or chat_template_kwargs with enable_thinking"),
    "reasoning": Unsupported("send reasoning_effort", ({},)),
    "thinking": Unsupported("send reasoning_effort, or chat_template_kwargs"),
    "thinking_budget": Unsupported("send thinking_token_budget", (), "thinking_token_budget"),
}
OF_CHATS = {"add_special_tokens": Unsupported("the chat template formats the prompt", (False,))}


def check_supported(fields: dict[str, Any], is_chat: bool) -> None:
    """Raise RequestError 400 that names the first unsupported field."""
    for name, value in fields.items():
        unsupported = FIELDS.get(name) or (OF_CHATS.get(name) if is_chat else None)
        if unsupported is None or value is None or value in unsupported.asks_nothing:
            continue
        if not unsupported.negatives_ask and isinstance(value, int | float) and value < 0:
            continue
        if unsupported.beside and all(fields.get(other) in (None, nothing) for other, nothing in unsupported.beside):
            continue
        if not unsupported.same_as or value != fields.get(unsupported.same_as):
            raise invalid(name, f"{shown(value)} is not supported; {unsupported.remedy}")
