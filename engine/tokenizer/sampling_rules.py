"""Checks and resolves sampling parameters that need the model's limits or vocabulary.

Used by the tokenizer processes. Pure. Mistakes of users raise a RequestError that names the parameter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import takewhile

import msgspec

from engine.errors import RequestError
from engine.messages import SamplingParams, TextOptions
from engine.tokenizer.vocabulary import Vocabulary


class SamplingRules:
    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        max_positions: int,
    ) -> None:
        """`vocab_size`: of the model. `max_positions`: what the KV cache can hold of one sequence, at most `max_model_len`."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._max_positions = max_positions

    def max_tokens(self, max_tokens: int, num_prompt_tokens: int, param: str, note: str = "", is_cut: bool = False) -> int:
        """Return `max_tokens` as requested, or as many as the model has room for (`is_cut`: the smaller of both). `param`: the
        field of the prompt; `note`: its composition, for error messages."""
        if is_cut and max_tokens > 0:
            max_tokens = min(max_tokens, max(1, self._max_positions - num_prompt_tokens))
        self._check_length(num_prompt_tokens, max_tokens, param, note)
        return max_tokens if max_tokens >= 0 else max(1, self._max_positions - num_prompt_tokens)

    def first_token(self, num_kept: int, max_tokens: int, num_tokens: int) -> int:
        """Return the first token to keep of a prompt of `num_tokens`, if the last `num_kept` are used; 0: all, -1: as many as
        fit."""
        if num_kept < 0:
            num_answer_tokens = max(1, max_tokens) if max_tokens else 0
            if num_answer_tokens >= self._max_positions:  # it will be cut: half of the room is for the prompt
                num_answer_tokens = self._max_positions // 2
            num_kept = self._max_positions - num_answer_tokens
        return max(0, num_tokens - num_kept) if num_kept else 0

    def resolve(self, sampling: SamplingParams, text: TextOptions) -> SamplingParams:
        """Return the parameters with end tokens and bad words filled in, the same for all sequences of a request."""
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.allowed_token_ids, "allowed_token_ids")
        self._check_ids(sampling.logit_bias, "logit_bias")
        self._check_ids(sampling.logprob_token_ids, "logprob_token_ids")
        if not all(text.stop):
            raise RequestError("a stop string is empty; it would end every text at once", param="stop")
        bad_words_token_ids = sampling.bad_words_token_ids + self._encode_bad_words(text.bad_words)
        for token_ids in bad_words_token_ids:
            self._check_ids(token_ids, "bad_words")
        has_end = text.format is not None or (
            text.parsing is not None and text.parsing.binds
        )  # a complete answer ends, regardless of other parameters
        eos_token_ids = () if sampling.ignore_eos and not has_end else self._eos_token_ids
        return msgspec.structs.replace(
            sampling,
            stop_token_ids=list(dict.fromkeys((*sampling.stop_token_ids, *eos_token_ids))),
            bad_words_token_ids=bad_words_token_ids,
            prediction_token_ids=self._encode_prediction(text.prediction),
            dry_breaker_token_ids=[*sampling.dry_breaker_token_ids, *self._encode_breakers(text.dry_breakers)],
        )

    def _check_length(self, num_prompt_tokens: int, max_tokens: int, param: str, note: str) -> None:
        limit = self._max_model_len
        if num_prompt_tokens == 0:
            raise RequestError(f"the {param} has no tokens; send at least one", param=param)
        if num_prompt_tokens + (max_tokens != 0) > limit:
            room = "" if num_prompt_tokens > limit else ", which leaves no room for an answer"
            raise _too_long(limit, f"the {param} has {num_prompt_tokens} tokens{note}{room}. Shorten it", param)
        if num_prompt_tokens + max_tokens > limit:
            raise _too_long(
                limit,
                f"you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {param}{note}, "
                f"{max_tokens} for the completion). Shorten the {param}, lower max_tokens to {limit - num_prompt_tokens}",
                "max_tokens",
            )

    def _check_ids(self, token_ids: Iterable[int], param: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{param}: token id {token_id} is outside the model's vocabulary of {self._vocab_size} tokens", param=param
                )

    def _encode_breakers(self, breakers: list[str]) -> list[int]:
        """Return the last token of each breaker, as it is after a word."""
        ends = {self._vocabulary.encode("a" + breaker, False)[-1] for breaker in breakers}
        return sorted(token_id for token_id in ends if 0 <= token_id < self._vocab_size)

    def _encode_prediction(self, text: str) -> bytes:
        """Encode a prediction, without tokens beyond the longest answer or after one that the model cannot sample."""
        if not text:
            return b""
        token_ids = self._vocabulary.encode(text[: self._max_model_len * self._vocabulary.longest_token_bytes], False)
        sayable = takewhile(lambda token_id: 0 <= token_id < self._vocab_size, token_ids[: self._max_model_len])
        return array("i", sayable).tobytes()

    def _encode_bad_words(self, words: list[str]) -> list[list[int]]:
        """Return each word as it begins a text and, if different by more than a space token, as it follows a space."""
        sequences: list[list[int]] = []
        for word in words:
            bare = self._vocabulary.encode(word.lstrip(), False)
            if not bare:
                raise RequestError(f"bad_words: {word!r} has no tokens", param="bad_words")
            spaced = self._vocabulary.encode(" " + word.lstrip(), False)
            sequences.append(bare)
            if spaced[-len(bare) :] != bare:
                sequences.append(spaced)
        return sequences


def _too_long(limit: int, what: str, param: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, {what}, or start with a larger --max-model-len.",
        code="context_length_exceeded",
        param=param,
    )
