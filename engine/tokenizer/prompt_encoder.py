"""Turns a prompt of any kind into token ids, with its images and video in place.

Used by the tokenizer processes, one `PromptEncoder` each. Mistakes of users raise RequestError.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from datetime import datetime

import msgspec

from engine.errors import RequestError
from engine.messages import ChatPrompt, MediaItem, Prompt, TextPrompt, TokensPrompt
from engine.tokenizer.chat.template import ChatTemplates
from engine.tokenizer.fill_in_middle import with_gap
from engine.tokenizer.placement import Placed, Placement
from engine.tokenizer.vocabulary import Vocabulary

MIN_TEXT_LIMIT_BYTES = 1 << 20


def max_text_bytes(vocabulary: Vocabulary, max_model_len: int) -> int:
    """Return the size of the longest text that is worth encoding (at least to count its tokens): more bytes cannot fit the
    model's context."""
    return max(MIN_TEXT_LIMIT_BYTES, max_model_len * vocabulary.longest_token_bytes)


def param_of(prompt: Prompt) -> str:
    """Return the name of the request field of `prompt`."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


class PromptEncoder:
    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: ChatTemplates,
        *,
        vocab_size: int,
        max_model_len: int,
        placement: Placement | None = None,
        num_token_types: int = 0,
    ) -> None:
        """`vocab_size` is the model's: ids below it have an embedding, even if the tokenizer does not know them.
        `placement`: for a vision model. `num_token_types`: of an encoder model; its tokenizer file defines how two texts
        become one prompt."""
        self._vocabulary = vocabulary
        self._templates = templates
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._placement = placement
        self._num_token_types = num_token_types
        self._max_text_bytes = max_text_bytes(vocabulary, max_model_len)

    @property
    def num_begin_tokens(self) -> int:
        """Tokens at the start of a prompt that are kept when it is truncated: the first token of an encoder model may represent
        all of it."""
        return int(self._num_token_types > 0)

    def encode(
        self,
        prompt: Prompt,
        media: Sequence[MediaItem] = (),
        arrival_ns: int = 0,
        is_draft: bool = False,
        must_fit: bool = False,
    ) -> Placed:
        """Return the prompt's token ids (int32) and units. `arrival_ns` (CLOCK_MONOTONIC; 0: now) is the time that a chat
        template sees. `is_draft`: placeholders may lack items, if there are no items at all. `must_fit`: a text that is
        certainly too long for the model, judging by its bytes, is rejected before it is encoded."""
        param = param_of(prompt)
        if self._num_token_types and isinstance(prompt, TextPrompt) and prompt.second is not None:
            return self._encode_two(prompt.text, prompt.second, must_fit)
        token_ids = self.checked(self._token_ids(prompt, media, arrival_ns, must_fit), param)
        if self._placement is None or (is_draft and not media):
            return Placed(token_ids)
        return self._placement.place(
            token_ids,
            media,
            param=param,
            max_tokens=self._max_model_len,
            encode=lambda text: self._vocabulary.encode(text, False),
            is_labelled=not isinstance(prompt, TokensPrompt),
            are_single=isinstance(prompt, ChatPrompt),
        )

    def _token_ids(self, prompt: Prompt, media: Sequence[MediaItem], arrival_ns: int, must_fit: bool) -> array[int]:
        if isinstance(prompt, TokensPrompt):
            return array("i", prompt.token_ids)
        if isinstance(prompt, TextPrompt) and prompt.second is not None:
            return self._encode_pair(prompt.text, prompt.second, arrival_ns, must_fit)
        if isinstance(prompt, TextPrompt):
            if prompt.suffix is not None:
                return self._encode_gap(prompt, must_fit)
            text = self._vocabulary.marked(prompt.text)
            return self._encode_text(text, media, prompt.add_special_tokens, "prompt", must_fit)
        # the template adds the special tokens
        return self._encode_text(self._templates.render(prompt, _wall_time(arrival_ns)), media, False, "messages", must_fit)

    def _encode_gap(self, prompt: TextPrompt, must_fit: bool) -> array[int]:
        prefix = self._encode_text(prompt.text, (), False, "prompt", must_fit).tolist()
        suffix = self._encode_text(prompt.suffix or "", (), False, "suffix", must_fit).tolist()
        return array("i", with_gap(self._vocabulary, prefix, suffix, prompt.add_special_tokens))

    def _encode_pair(self, query: str, document: str, arrival_ns: int, must_fit: bool) -> array[int]:
        """Encode two texts with the model's template if it has roles for them, else one after the other."""
        if not self._templates.has_pairs:
            return self._encode_text(query + document, (), True, "prompt", must_fit)
        turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        text = self._templates.render(ChatPrompt(msgspec.json.encode(turns)), _wall_time(arrival_ns))
        return self._encode_text(text, (), False, "prompt", must_fit)

    def _encode_two(self, first: str, second: str, must_fit: bool) -> Placed:
        encode = self._vocabulary.encode_pair
        if encode is None:
            raise RequestError("this model's tokenizer does not define how to encode a pair of texts; add a tokenizer.json")
        self._check_size(first + second, "prompt", must_fit)
        token_ids, second_start = encode(first, second)
        found = self.checked(array("i", token_ids), "prompt")
        return Placed(found, second_start=second_start if self._num_token_types > 1 else 0)

    def _encode_text(
        self, text: str, media: Sequence[MediaItem], add_special_tokens: bool, param: str, must_fit: bool
    ) -> array[int]:
        self._check_size(text, param, must_fit)
        if self._placement is not None:
            text = self._placement.labelled(text, media, are_single=param == "messages")
        return array("i", self._vocabulary.encode(text, add_special_tokens))

    def _check_size(self, text: str, param: str, must_fit: bool) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}", param=param) from error
        if num_bytes > self._max_text_bytes:
            raise RequestError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, the text has {num_bytes} "
                f"bytes, the limit is {self._max_text_bytes}. Shorten it.",
                code="context_length_exceeded",
                param=param,
            )
        least = self._vocabulary.least_tokens(text) if must_fit and num_bytes > self._max_model_len else 0
        if least > self._max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, the text has {num_bytes} "
                f"bytes, which are at least {least} tokens. Shorten it, or start with a larger --max-model-len.",
                code="context_length_exceeded",
                param=param,
            )

    def checked(self, token_ids: array[int], param: str) -> array[int]:
        """Return `token_ids` after checking that all are within the model's vocabulary."""
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the model's vocabulary of {self._vocab_size} tokens", param=param
                )
        return token_ids


def _wall_time(monotonic_ns: int) -> datetime:
    """Return the local time for a value of CLOCK_MONOTONIC."""
    age_ns = time.monotonic_ns() - monotonic_ns if monotonic_ns else 0
    return datetime.fromtimestamp((time.time_ns() - age_ns) / 1e9)
