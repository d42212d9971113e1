"""One sample's sampling parameters as arrays, made once when it takes a slot. Pure numpy.

Used by the slots and the sampler. Token ids outside the vocabulary are dropped here: a bad request must not end the worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """`params` with what is looked up in every step."""

    params: SamplingParams
    bias_token_ids: np.ndarray
    biases: np.ndarray  # float32
    allowed_token_ids: np.ndarray  # empty: all
    stop_token_ids: np.ndarray
    bad_words: tuple[np.ndarray, ...]
    changes_logits: bool  # by anything but the temperature

    @staticmethod
    def of(params: SamplingParams, vocab_size: int) -> SlotSampling:
        def known(token_ids: Iterable[int]) -> np.ndarray:
            return np.array(sorted({token_id for token_id in token_ids if 0 <= token_id < vocab_size}), np.int64)

        bias_token_ids = known(params.logit_bias)
        bad_words = tuple(
            np.array(word, np.int64) for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size
        )
        has_penalty = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        return SlotSampling(
            params=params,
            bias_token_ids=bias_token_ids,
            biases=np.array([params.logit_bias[token_id] for token_id in bias_token_ids.tolist()], np.float32),
            allowed_token_ids=known(params.allowed_token_ids),
            stop_token_ids=known(params.stop_token_ids),
            bad_words=bad_words,
            changes_logits=bool(
                has_penalty or params.logit_bias or params.allowed_token_ids or bad_words or params.min_tokens > 0
            ),
        )
