"""Parameters of requests: vLLM's SamplingParams, StructuredOutputsParams, RepetitionDetectionParams and PoolingParams, and
their fields in a request.

An unknown field is a TypeError. A value that would change the answer but is not supported is a ValueError at once; the engine
checks ranges at the first request. Unset fields are sent with vLLM's defaults, not the model's.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

_NEUTRAL = (None, False, 0, {}, [])


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Constraint on an answer: one of the first six fields."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'nothing'} given; an answer has one form: give one of {', '.join(kinds)}"
            )
        _refuse(self, {"disable_additional_properties": 'say "additionalProperties": false in the schema'})


class RepetitionDetectionParams(msgspec.Struct):
    """An answer ends when its last tokens are `min_count` repetitions of one pattern."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct):
    """Sampling parameters with vLLM's names; those from `best_of` on are ours or from older versions of vLLM."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # no effect: special tokens have their own spaces
    include_stop_str_in_output: bool = False
    output_kind: Any = None  # no effect: outputs are whole
    stream_interval: int | None = None  # no effect: outputs are whole
    skip_clone: bool = False  # no effect: parameters are not changed
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    best_of: int | None = None
    guided_decoding: StructuredOutputsParams | None = None
    logits_processors: list[Any] | None = None
    truncate_prompt_tokens: int | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    timeout: float | None = None  # seconds

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        self.check()

    def check(self) -> None:
        """ValueError for unsupported values. Called again before each use, because fields can be set later."""
        _refuse(self, _REFUSED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            if getattr(self, name) == -1:
                raise ValueError(f"{name} is -1, the whole vocabulary; give a number up to max_logprobs, or logprob_token_ids")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are sought in the text; set detokenize to True, or give stop_token_ids")
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise ValueError("structured_outputs and guided_decoding are the same; give one")

    def clone(self) -> SamplingParams:
        return msgspec.structs.replace(self)

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Make parameters; None means the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None or name == "max_tokens"})

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request to `/v1/completions`."""
        self.check()
        form = self.structured_outputs or self.guided_decoding
        found = {name: getattr(self, name) for name in _SENT}
        found["logit_bias"] = {str(key): bias for key, bias in self.logit_bias.items()} if self.logit_bias else None
        found["structured_outputs"] = msgspec.to_builtins(form) if form is not None else None
        found["repetition_detection"] = msgspec.to_builtins(self.repetition_detection)
        found = {name: value for name, value in found.items() if value is not None}
        for name, value in found.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; expected a finite number")
        if self.max_tokens is None:
            found["max_tokens"] = _AS_MANY
        if self.logprobs is None and self.logprob_token_ids:
            found["logprobs"] = 0
        return found


_REFUSED = {  # field -> the remedy
    "prompt_logprob_token_ids": "prompt_logprobs gives the likeliest",
    "prompt_logprob_start": "prompt_logprobs are of the whole prompt",
    "flat_logprobs": "they are lists of dictionaries",
    "extra_args": "there is nothing that would read them",
    "routed_experts_prompt_start": "experts are not reported by token",
    "trace_decode_token_ids": "give them as a prompt, with prompt_logprobs",
    "logits_processors": "no code enters the engine; logit_bias, allowed_token_ids, bad_words and structured_outputs do",
}
_AS_MANY = 2**31 - 1  # tokens: cut to the room that the prompt leaves
_LOCAL = (  # handled by `fields`, or in the client
    *_REFUSED,
    "logit_bias",
    "detokenize",
    "spaces_between_special_tokens",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "structured_outputs",
    "guided_decoding",
    "repetition_detection",
    "skip_reading_prefix_cache",
)
_SENT = tuple(name for name in SamplingParams.__struct_fields__ if name not in _LOCAL)


class LoRARequest(msgspec.Struct):
    """Adapter, loaded on first use (with `enable_lora=True`)."""

    lora_name: str
    lora_int_id: int = 0  # no effect: the name counts
    lora_path: str = ""  # empty: one of `lora_modules`


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Parameters of embeddings and scores."""

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def fields(self, *names: str) -> dict[str, Any]:
        """Return the fields of a request. ValueError if the request does not support one of them."""
        given = msgspec.to_builtins(self)
        for name in given:
            if name not in names:
                raise ValueError(f"{name} has no meaning here; leave it out")
        return dict(given)


def _refuse(given: msgspec.Struct, remedies: dict[str, str]) -> None:
    for name, remedy in remedies.items():
        if getattr(given, name) not in _NEUTRAL:
            raise ValueError(f"{name} is not supported: {remedy}; leave it out")
