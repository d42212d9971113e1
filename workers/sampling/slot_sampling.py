"""Sampling parameters of one sequence, converted once when it takes a slot: a record that the native sampler reads. Pure numpy.

Used by the sampler. Token ids outside the vocabulary are dropped here, so that a bad request cannot end the worker.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.messages import SamplingParams, SlotStart
from ops import _cpu
from workers.engine.batch_slots import BatchSlots

# SlotSampling in ops/cpu/native/sampling.h, with the byte offsets there.
SAMPLING = np.dtype(
    [
        ("seed", np.uint64),
        ("lists", np.uint64),  # address of `token_lists`
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("sample_index", np.uint32),
        ("top_k", np.int32),
        ("min_tokens", np.int32),
        ("num_logprobs", np.int32),
        ("num_prompt_logprobs", np.int32),
        ("num_biases", np.int32),
        ("num_allowed", np.int32),  # -1: all tokens are allowed
        ("num_stops", np.int32),
        ("num_words", np.int32),
        ("first_masked", np.int32),
        ("num_masks", np.int32),
        ("masks", np.uint64),  # address, set by `extensions/grammars/grammars.py`
        ("top_n_sigma", np.float64),
        ("typical_p", np.float64),
        ("xtc_probability", np.float64),
        ("xtc_threshold", np.float64),
        ("dry_multiplier", np.float32),
        ("dry_base", np.float32),
        ("dry_allowed_length", np.int32),
        ("dry_last_n", np.int32),
        ("num_breakers", np.int32),
        ("unused", np.int32),
    ]
)
assert SAMPLING.itemsize == _cpu.SLOT_SAMPLING_BYTES, "SAMPLING and native/sampling.h lay parameters out differently"

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_n_sigma",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
)
_U64, _U32, _INT32_MAX = 2**64 - 1, 2**32 - 1, 2**31 - 1


def record_of(params: SamplingParams, vocab_size: int) -> tuple[np.void, np.ndarray]:
    """Return a SAMPLING record of `params`, and the token lists that it points to."""

    def known(token_ids: Iterable[int]) -> list[int]:
        return sorted({token_id for token_id in token_ids if 0 <= token_id < vocab_size})

    bias_ids, stop_ids = known(params.logit_bias), known(params.stop_token_ids)
    allowed_ids = known(params.allowed_token_ids)
    breaker_ids = known(params.dry_breaker_token_ids)
    words = [word for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size]
    record = np.zeros(1, SAMPLING)[0]
    lists = _token_lists(
        bias_ids, [params.logit_bias[token_id] for token_id in bias_ids], allowed_ids, stop_ids, words, breaker_ids
    )
    for name in _FLOATS:
        record[name] = getattr(params, name)
    record["seed"] = params.seed & _U64
    record["lists"] = lists.ctypes.data
    record["sample_index"] = params.sample_index & _U32
    for name in ("top_k", "min_tokens", "num_logprobs", "dry_allowed_length", "dry_last_n"):
        record[name] = min(getattr(params, name), _INT32_MAX)
    record["num_prompt_logprobs"] = min(params.num_prompt_logprobs, vocab_size)
    record["num_biases"] = len(bias_ids)
    record["num_allowed"] = len(allowed_ids) if params.allowed_token_ids else -1
    record["num_stops"], record["num_words"], record["num_breakers"] = len(stop_ids), len(words), len(breaker_ids)
    return record, lists


def is_plain(params: SamplingParams) -> bool:
    """Return whether a device can sample the sequence: it has no parameters but temperature, top_k, top_p, min_p and seed, and
    requests no log-probabilities of other tokens. This depends only on the request, so that the same arithmetic samples the
    whole answer."""
    changes = (
        params.logit_bias,
        params.allowed_token_ids,
        params.bad_words_token_ids,
        params.min_tokens > 0,
        params.grammar is not None,
        params.repetition_penalty != 1.0,
        params.presence_penalty != 0.0,
        params.frequency_penalty != 0.0,
        params.dry_multiplier != 0.0,
        params.top_n_sigma > 0.0,
        params.typical_p < 1.0,
        params.xtc_probability > 0.0,
    )
    return not any(changes) and params.num_logprobs <= 0 and not params.logprob_token_ids


def _token_lists(
    bias_ids: list[int],
    biases: list[float],
    allowed_ids: list[int],
    stop_ids: list[int],
    words: list[list[int]],
    breaker_ids: list[int],
) -> np.ndarray:
    """Return int32: bias ids | biases (float32 bits) | allowed | stops | offsets of words, from their end | words |
    breakers."""
    offsets = np.cumsum([0, *map(len, words)])
    parts = [bias_ids, np.array(biases, np.float32).view(np.int32), allowed_ids, stop_ids, offsets, *words, breaker_ids]
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


class SlotSampling:
    """Sampling parameters of every batch slot (`BatchSlots.add_part`)."""

    def __init__(self, slots: BatchSlots) -> None:
        self.slots = slots
        self.records = slots.register("sampling", np.zeros((), SAMPLING)[()], dtype=SAMPLING)
        self.token_lists = slots.register("token_lists", None, dtype=object)  # `records` point to it
        self.is_plain = slots.register("is_plain", False, dtype=np.bool_)
        self.wants_prompt_logprobs = slots.register("wants_prompt_logprobs", False, dtype=np.bool_)
        self.names_tokens = slots.register("names_tokens", False, dtype=np.bool_)  # whether `logprob_token_ids` has any
        self.logprob_token_ids = slots.register("logprob_token_ids", None, dtype=object)  # int32
        slots.add_part(self)

    def start(self, message: SlotStart) -> None:
        slot, params = message.slot, message.sampling
        self.wants_prompt_logprobs[slot] = message.wants_prompt_logprobs
        self.records[slot], self.token_lists[slot] = record_of(params, self.slots.vocab_size)
        self.is_plain[slot] = is_plain(params)
        if params.logprob_token_ids:
            self.names_tokens[slot] = True
            self.logprob_token_ids[slot] = np.array(params.logprob_token_ids, np.int32)

    def append(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Append tokens (`BatchSlots.append`), and mark the slots that got a stop token as ended."""
        self.slots.append(slots, positions, token_ids)
        slots, positions = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(positions, np.int64)
        token_ids = np.ascontiguousarray(token_ids, np.int32)
        drawn = _cpu.address(slots), _cpu.address(positions), _cpu.address(token_ids), len(slots)
        own = self.slots
        _cpu.find_ends(*drawn, _cpu.address(self.records), _cpu.address(own.num_prompt_tokens), _cpu.address(own.is_ended))
