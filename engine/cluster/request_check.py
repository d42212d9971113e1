"""Checks of a router's request by the link of an engine, before schedulers and ranks see it.

On one machine the api and the tokenizer check a request, and no other process can write into their rings. A peer is any program
with the key, so every number is checked again, and a request with a wrong one is refused. (Should a router let something pass
that is refused here, its other requests go on.) The scheduler decides whether a request fits the engine. Pure.
"""

from __future__ import annotations

import math
from array import array

from engine.cluster.frames import MAX_NAME_CHARACTERS, WrongFrameError
from engine.config import MAX_LOGPROBS, EngineConfig
from engine.errors import RequestError
from engine.messages import MediaItem, Request, SamplingParams, TokenizedPrompt

MAX_INT32 = (1 << 31) - 1
MAX_SEQUENCES = 4096
MAX_IDS = 1 << 20  # in a list of token ids
MAX_GRAMMAR_BYTES = 16 << 20  # a grammar is longer than the text of the request
MAX_UNITS = 1 << 14  # of media in a prompt
MAX_UNIT_TIME = 1 << 16
_TIME_NS = 1 << 62

# ranges of numbers: least, most
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (-1, MAX_INT32),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, (1 << 64) - 1),
    "sample_index": (0, MAX_INT32),
    "min_tokens": (0, MAX_INT32),
    "max_tokens": (-1, MAX_INT32),
    "num_logprobs": (-1, MAX_LOGPROBS),
    "num_prompt_logprobs": (-1, MAX_LOGPROBS),
    "top_n_sigma": (-1, 100),
    "typical_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "dry_allowed_length": (0, MAX_INT32),
    "dry_last_n": (-1, MAX_INT32),
}


def check_names(request: Request) -> None:
    """Raise WrongFrameError if a request cannot even be refused: no router sends such ids."""
    names = [request.tokenizer, request.shared.key, request.shared.api]
    names += [name for own in request.sequences for name in (own.request_id, own.group_id)]
    if max(map(len, names)) > MAX_NAME_CHARACTERS:
        raise WrongFrameError("a request with an id that is too long")
    if not 0 < len(request.sequences) <= MAX_SEQUENCES or not 0 < len(request.prompts) <= MAX_SEQUENCES:
        raise WrongFrameError(f"{len(request.sequences)} sequences of {len(request.prompts)} prompts")
    if not all(0 <= own.attempt <= MAX_INT32 for own in request.sequences):
        raise WrongFrameError("an attempt below 0")


def check_request(request: Request, config: EngineConfig, vocab_size: int) -> None:
    """Raise RequestError if a request has something that no router sends. `vocab_size`: token ids are below it."""
    shared = request.shared
    texts = [shared.source, shared.options.adapter.contents if shared.options.adapter is not None else ""]
    if max(map(len, texts)) > MAX_NAME_CHARACTERS:
        raise RequestError(f"a user or an adapter with more than {MAX_NAME_CHARACTERS} characters")
    _check_range("priority", shared.priority, -MAX_INT32, MAX_INT32)
    _check_range("age", shared.arrival_ns, 0, _TIME_NS)
    _check_range("time left", shared.deadline_ns, 0, _TIME_NS)
    if shared.media and (not config.media_processes or len(request.prompts) != 1):
        raise RequestError("media for a model that has none, or for several prompts")
    for prompt in request.prompts:
        _check_prompt(prompt, vocab_size)
        _check_units(prompt, shared.media)
    if len(shared.mask_bounds) % 8 or (shared.mask_bounds and config.kv_groups[0].window):
        raise RequestError("bounds of attention that are none, or that the model does not take")
    for own in request.sequences:
        _check_range("prompt", own.prompt_index, 0, len(request.prompts) - 1)
        _check_range("sample", own.sample_index, 0, MAX_INT32)
        _check_range("weight version", own.weight_version, 0, MAX_INT32)
        _check_range("scored tokens", own.num_scored_prompt_tokens, 0, MAX_INT32)
        _check_tokens(own.resume_token_ids, vocab_size)
    _check_sampling(shared.sampling, config, vocab_size)


def _check_prompt(prompt: TokenizedPrompt, vocab_size: int) -> None:
    _check_tokens(prompt.token_ids, vocab_size)
    _check_range("max_tokens", prompt.max_tokens, -1, MAX_INT32)
    _check_range("second text", prompt.second_start, 0, len(prompt.token_ids) // 4)


def _check_units(prompt: TokenizedPrompt, media: list[MediaItem]) -> None:
    """Check the places of media in a prompt against their facts."""
    if len(prompt.units) > MAX_UNITS:
        raise RequestError(f"{len(prompt.units)} units of media in a prompt")
    end = 0
    for unit in prompt.units:
        _check_range("item", unit.item, 0, len(media) - 1)
        _check_range("unit", unit.index, 0, len(media[unit.item].unit_hashes) - 1)
        _check_range("place of a unit", unit.start, end, len(prompt.token_ids) // 4)
        _check_range("tokens of a unit", unit.num_tokens, 1, len(prompt.token_ids) // 4 - unit.start)
        _check_range("height", unit.height, 1, unit.num_tokens)
        _check_range("width", unit.width, 1, unit.num_tokens // unit.height)
        _check_range("time", unit.time, 0, MAX_UNIT_TIME)
        if unit.num_tokens != media[unit.item].tokens_per_unit:
            raise RequestError(f"a unit of {unit.num_tokens} tokens, its item has {media[unit.item].tokens_per_unit}")
        end = unit.start + unit.num_tokens


def _check_sampling(sampling: SamplingParams, config: EngineConfig, vocab_size: int) -> None:
    for name, (least, most) in _RANGES.items():
        _check_range(name, getattr(sampling, name), least, most)
    words = sampling.bad_words_token_ids
    lists = (sampling.stop_token_ids, sampling.allowed_token_ids, sampling.logprob_token_ids, sampling.dry_breaker_token_ids)
    for ids in (*lists, [*sampling.logit_bias], *words, [len(word) - 1 for word in words]):
        _check_ids(ids, vocab_size)
    for bias in sampling.logit_bias.values():
        _check_range("logit_bias", bias, -100, 100)
    _check_tokens(sampling.prediction_token_ids, vocab_size)
    if (sampling.pooling is None) != (config.pooling is None):
        raise RequestError("a request for another task than this engine's")
    if sampling.pooling is not None and config.pooling is not None:
        _check_range("dimensions", sampling.pooling.num_dimensions, 0, config.pooling.num_values)
    grammar = sampling.grammar
    if grammar is not None:
        _check_tokens(grammar.end_of_thinking, vocab_size)
        _check_tokens(grammar.begin_of_thinking, vocab_size)
        _check_range("reasoning tokens", grammar.max_thinking_tokens, -1, MAX_INT32)
        _check_range("size of the grammar", len(grammar.text), 0, MAX_GRAMMAR_BYTES)


def _check_tokens(data: bytes, vocab_size: int) -> None:
    """Check int32 token ids."""
    if len(data) % 4:
        raise RequestError(f"{len(data)} bytes of token ids")
    ids = array("i", data)
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise RequestError(f"token ids outside the vocabulary of {vocab_size} tokens")


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if len(ids) > MAX_IDS or not all(0 <= token_id < vocab_size for token_id in ids):
        raise RequestError(f"token ids outside the vocabulary of {vocab_size} tokens, or too many of them")


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise RequestError(f"{name} is {value}, expected {least} to {most}")
