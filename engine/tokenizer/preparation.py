"""All work on text for a message: rendering, encoding, and resolving parameters that need the vocabulary.

Done in the tokenizer's helper processes (`helper.py`); prompts of token ids alone are prepared in its own loop. A user's
mistake, an error in a library and a bug of ours each become a `Refusal`: no request can end a process.
"""

from __future__ import annotations

import logging
from array import array

import msgspec

from engine.errors import RequestError
from engine.messages import (
    AnswerFormat,
    ChatPrompt,
    Detokenize,
    Detokenized,
    Grammar,
    Prompt,
    SamplingParams,
    SharedPart,
    Submit,
    Tokenize,
    Tokenized,
    TokenizedPrompt,
    TokensPrompt,
    decode,
)
from engine.parsers.registry import Parsers
from engine.tokenizer.answer_formats import AnswerFormats
from engine.tokenizer.detokenizer import decode as text_of
from engine.tokenizer.prompt_encoder import PromptEncoder, param_of
from engine.tokenizer.sampling_rules import SamplingRules
from engine.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)


class Refusal(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Why something cannot be prepared: an HTTP status with OpenAI's error fields."""

    message: str
    status: int = 400
    code: str = ""
    param: str = ""
    retry_after_s: int = 0


class PreparedPrompt(msgspec.Struct, tag=True, array_like=True, frozen=True):
    tokenized: TokenizedPrompt


class Prepared(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request's sampling parameters, resolved except for `max_tokens`, and its prompts in order."""

    sampling: SamplingParams
    prompts: list[PreparedPrompt | Refusal]


Work = Submit | Tokenize | Detokenize
Answer = Prepared | Tokenized | Detokenized | Refusal

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
decode_answer = _decoder.decode


def is_light(work: Work) -> bool:
    """Return whether it takes next to no time: token ids need no work on text."""
    if not isinstance(work, Submit):
        return False
    text = work.shared.text
    return not (text.bad_words or text.prediction or text.format or text.dry_breakers) and all(
        isinstance(prompt, TokensPrompt) for prompt in work.prompts
    )


def refusal_of(error: BaseException) -> Refusal:
    """Return the error for the user. A panic in a library (not an Exception) fails only the request that caused it, like our
    own bugs."""
    if isinstance(error, RequestError):
        return Refusal(error.message, error.status, error.code, error.param, error.retry_after_s)
    log.error("a request could not be prepared", exc_info=error)
    return Refusal(f"the request could not be prepared: {error!r}"[:1000], status=500)


class Preparation:
    """Prepares requests, in a tokenizer and its helpers."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: PromptEncoder,
        rules: SamplingRules,
        formats: AnswerFormats,
        parsers: Parsers,
        max_model_len: int,
        *,
        has_causal_layers: bool = False,
    ) -> None:
        """`has_causal_layers`: the model cannot take key bounds of clients."""
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._rules = rules
        self._formats = formats
        self.parsers = parsers
        self._max_model_len = max_model_len
        self._has_causal_layers = has_causal_layers

    def write_vocabulary(self) -> None:
        """Write the vocabulary for grammars that were checked elsewhere."""
        self._formats.write_vocabulary()

    def answer(self, record: bytes) -> bytes:
        """Do a helper's work: take an encoded message, return an encoded answer."""
        work = decode(record)
        assert isinstance(work, Work), work
        return _encoder.encode(self.prepare(work))

    def prepare(self, work: Work) -> Answer:
        """Prepare the texts of a message. Never raises."""
        try:
            if isinstance(work, Submit):
                sampling = self._with_grammar(self._rules.resolve(work.shared.sampling, work.shared.text), work)
                return Prepared(sampling, [self._prompt(prompt, work.shared) for prompt in work.prompts])
            if isinstance(work, Tokenize):
                return self._tokenized(work)
            return Detokenized(work.call_id, text_of(self._vocabulary, self._ids(work.token_ids)))
        except BaseException as error:
            return refusal_of(error)

    def _with_grammar(self, sampling: SamplingParams, work: Submit) -> SamplingParams:
        """Return the sampling parameters with the grammar of a structured answer, of calls, or of either, and the reasoning
        budget."""
        format_, parsing = work.shared.text.format, work.shared.text.parsing
        if format_ is None and (parsing is None or not parsing.has_grammar):
            return sampling
        (tools,) = {prompt.tools for prompt in work.prompts if isinstance(prompt, ChatPrompt)} or {b""}
        format_lark = self._formats.lark(format_) if format_ is not None else ""
        lark = ""
        if parsing is not None and (format_ is None or parsing.has_format or parsing.choice != "auto"):
            lark = self.parsers.grammar(parsing, tools, format_lark)
        if (lark or format_lark) and not sampling.stop_token_ids:
            raise RequestError("the model has no end token; send stop_token_ids", param="stop_token_ids")
        grammar = None
        if lark:
            grammar = self._of_calls(lark, format_lark, format_)
        elif format_ is not None:
            grammar = self._formats.grammar(self.parsers.framed(format_lark, parsing), format_.param)
        if grammar is not None:
            self._formats.check_tokens(grammar, sampling)
        if parsing is not None and parsing.thinking_token_budget >= 0:
            grammar = self._formats.with_budget(grammar, parsing.thinking_token_budget)
        return msgspec.structs.replace(sampling, grammar=grammar)

    def _of_calls(self, lark: str, format_lark: str, format_: AnswerFormat | None) -> Grammar:
        """Return the grammar of calls, or of calls or an answer. An error names the format if that alone cannot be compiled."""
        try:
            return self._formats.of_calls(lark, format_lark)
        except RequestError:
            if format_ is not None:
                self._formats.grammar(format_lark, format_.param)
            raise

    def _prompt(self, prompt: Prompt, shared: SharedPart) -> PreparedPrompt | Refusal:
        try:
            must_fit = not shared.text.truncate_prompt_tokens
            placed = self._encoder.encode(prompt, shared.media, shared.arrival_ns, must_fit=must_fit)
            asked = shared.sampling.max_tokens
            is_whole = bool(placed.units or shared.mask_bounds)
            kept = self._cut(placed.token_ids, shared.text.truncate_prompt_tokens, asked, is_whole)
            is_cut = shared.text.is_max_tokens_cut
            max_tokens = self._rules.max_tokens(asked, len(kept), param_of(prompt), placed.note, is_cut)
            second_start = placed.second_start
            if second_start and len(kept) < len(placed.token_ids):
                second_start = max(1, second_start - (len(placed.token_ids) - len(kept)))
            if shared.mask_bounds and self._has_causal_layers:
                raise RequestError(
                    "attention_mask_offset is not supported for this model, because some of its layers are always causal; "
                    "remove it",
                    code="invalid_value",
                    param="attention_mask_offset",
                )
            _check_bounds(shared.mask_bounds, len(kept))
            token_ids = kept.tobytes()
            parsing = shared.text.parsing
            is_thinking = self.parsers.finds_reasoning(parsing) and self.parsers.begins_thinking(
                parsing, prompt, self._vocabulary.end_of(token_ids)
            )
            return PreparedPrompt(TokenizedPrompt(token_ids, max_tokens, placed.units, is_thinking, second_start))
        except BaseException as error:
            return refusal_of(error)

    def _tokenized(self, call: Tokenize) -> Tokenized:
        found = self._encoder.encode(call.prompt, call.media, is_draft=True).token_ids
        token_ids = self._cut(found, call.truncate_prompt_tokens, call.max_tokens, bool(call.media))
        tokens = [self._vocabulary.bytes_of(token_id) for token_id in token_ids] if call.returns_tokens else []
        return Tokenized(call.call_id, token_ids.tobytes(), self._max_model_len, tokens)

    def _cut(self, token_ids: array[int], num_kept: int, max_tokens: int, is_whole: bool) -> array[int]:
        """Return the last tokens of a prompt, according to `truncate_prompt_tokens`, after the first token that an encoder
        model needs. `is_whole`: it cannot be truncated."""
        first = self._rules.first_token(num_kept, max_tokens, len(token_ids))
        if first and is_whole:
            raise RequestError(
                "truncate_prompt_tokens: a prompt with media or attention_mask_offset cannot be truncated; shorten it",
                code="invalid_value",
                param="truncate_prompt_tokens",
            )
        num_begin = self._encoder.num_begin_tokens if first else 0
        return token_ids[:num_begin] + token_ids[first + num_begin :]

    def _ids(self, token_ids: bytes) -> array[int]:
        return self._encoder.checked(array("i", token_ids), "tokens")


def _check_bounds(mask_bounds: bytes, num_tokens: int) -> None:
    """Check the number of bounds, which the api process cannot: it does not know the prompt's length."""
    num_bounds = len(mask_bounds) // 8
    if num_bounds not in (0, num_tokens):
        raise RequestError(
            f"attention_mask_offset has {num_bounds} entries, but the prompt has {num_tokens} tokens; send one entry per token",
            code="invalid_value",
            param="attention_mask_offset",
        )
