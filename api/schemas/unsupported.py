"""Fields of other servers' chats and completions that change an answer there and cannot here: whoever sends one is told so, and
what to send instead, rather than answered as if he had not.

Called by the routes with a body as it came, whose own fields are checked. Null asks for nothing, nor does what says the same as
leaving the field out, or as a field that both kinds of bodies have here: clients of many servers send both names (SillyTavern:
n_predict and max_tokens).
"""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.requests import invalid, shown


class Unsupported(msgspec.Struct, frozen=True):
    remedy: str
    asks_nothing: tuple[Any, ...] = ()
    same_as: str = ""  # the field that may say the same


FIELDS = {
    # OpenAI's
    "audio": Unsupported("answers are text"),
    "function_call": Unsupported("send tool_choice", ("none", "auto")),
    "functions": Unsupported("send tools", ([],)),
    "modalities": Unsupported("answers are text", ([], ["text"])),
    "verbosity": Unsupported("say in a message how long answers are to be", ("medium",)),
    "web_search_options": Unsupported("this server searches nothing"),
    # vLLM's and SGLang's
    "custom_logit_processor": Unsupported("there are none", ("",)),
    "ebnf": Unsupported("send structured_outputs with a grammar", ("",)),
    "logits_processors": Unsupported("there are none", ([],)),
    "lora_path": Unsupported("send an adapter's name as model", ("", [])),
    "no_stop_trim": Unsupported("send include_stop_str_in_output", (False,)),
    "prompt_embeds": Unsupported("send text or token ids", ("", [])),
    "regex": Unsupported("send structured_outputs with a regex", ("",)),
    "spaces_between_special_tokens": Unsupported("leave it out", (True,)),
    "stop_regex": Unsupported("send stop", ("", [])),
    "use_beam_search": Unsupported("send n and best_of", (False,)),
    "vllm_xargs": Unsupported("leave it out", ({},)),
    # llama.cpp's
    "dynatemp_range": Unsupported("send temperature", (0,)),
    "grammar": Unsupported("send structured_outputs with a grammar", ("",)),
    "json_schema": Unsupported("send response_format"),
    "lora": Unsupported("send an adapter's name as model", ([],)),
    "mirostat": Unsupported("send typical_p or top_p", (0,)),
    "n_predict": Unsupported("send max_tokens", (-1,), "max_tokens"),
    "n_probs": Unsupported("send logprobs", (0,), "logprobs"),
    "repeat_penalty": Unsupported("send repetition_penalty", (1,), "repetition_penalty"),
    "samplers": Unsupported("their order is fixed; set those that are not to act to what changes nothing"),
    "t_max_predict_ms": Unsupported("send timeout, in seconds", (0, -1)),
}
OF_CHATS = {"add_special_tokens": Unsupported("the chat template writes them", (False,))}


def check_supported(fields: dict[str, Any], is_chat: bool) -> None:
    """RequestError 400 that names the first of them."""
    for name, value in fields.items():
        unsupported = FIELDS.get(name) or (OF_CHATS.get(name) if is_chat else None)
        if unsupported is None or value is None or value in unsupported.asks_nothing:
            continue
        if not unsupported.same_as or value != fields.get(unsupported.same_as):
            raise invalid(name, f"{shown(value)} cannot be had from this server; {unsupported.remedy}")
