"""Log-probabilities in the three formats that clients expect: OpenAI's for completions and for chats, vLLM's for prompts.

Called by the api process's completion handlers. Pieces of streams are built at once; a whole answer may have very many, so it
is built and encoded a few tokens per turn of the loop (`encoded_in_turns`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import msgspec

from api.schemas.requests import GenerationRequest
from api.schemas.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    encoder,
)
from engine.messages import DecodedLogprobs

LEAST_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have; OpenAI's and vLLM's value
TOKENS_PER_TURN = 128

T = TypeVar("T")
FirstToken = tuple[int, bytes]  # of a prompt: its id and bytes


async def encoded_in_turns(
    entries: Sequence[DecodedLogprobs], make: Callable[[Sequence[DecodedLogprobs]], Iterable[T]]
) -> list[T]:
    """Return the results of `make` as JSON that the encoder only copies; other tasks run after every few entries."""
    found: list[T] = []
    for start in range(0, len(entries), TOKENS_PER_TURN):
        made = make(entries[start : start + TOKENS_PER_TURN])
        found += [cast(T, msgspec.Raw(encoder.encode(item))) for item in made]
        await asyncio.sleep(0)
    return found


def token_text(token: bytes) -> str:
    """Return a token as text; part of a character in OpenAI's notation: `bytes:\\xe2\\x82`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def name_of(token_id: int, token: bytes) -> str:
    """Return a token by its id, in vLLM's notation."""
    return f"token_id:{token_id}"


def text_of(token_id: int, token: bytes) -> str:
    return token_text(token)


class LogprobsShown(msgspec.Struct, frozen=True):
    """Log-probabilities shown for a request: how many besides the token's own, and the names of tokens."""

    num_top: int
    called: Callable[[int, bytes], str] = text_of

    @staticmethod
    def of(request: GenerationRequest, num_top: int) -> LogprobsShown:
        num_chosen = len(request.logprob_token_ids or ())
        return LogprobsShown(num_chosen or num_top, name_of if request.return_tokens_as_token_ids else text_of)


def chat_logprobs(entries: Iterable[DecodedLogprobs], shown: LogprobsShown) -> list[TokenLogprob]:
    num_top, called = shown.num_top, shown.called
    return [
        TokenLogprob(
            called(entry.token_id, entry.token),
            _finite(entry.logprob),
            list(entry.token),
            [
                TopLogprob(called(token_id, token), _finite(logprob), list(token))
                for token_id, token, logprob in zip(
                    entry.top_token_ids[:num_top], entry.top_tokens, entry.top_logprobs, strict=False
                )
            ],
        )
        for entry in entries
    ]


async def whole_chat_logprobs(entries: Sequence[DecodedLogprobs], shown: LogprobsShown) -> ChatLogprobs:
    return ChatLogprobs(await encoded_in_turns(entries, lambda some: chat_logprobs(some, shown)))


class CompletionLogprobsBuilder:
    """Builds one choice's log-probabilities piece by piece; `text_offset` counts characters from the start of its text."""

    def __init__(self, shown: LogprobsShown) -> None:
        self._num_top = shown.num_top
        self._called = shown.called
        self._offset = 0

    def piece(self, entries: Iterable[DecodedLogprobs]) -> CompletionLogprobs:
        piece = CompletionLogprobs([], [], [], [])
        self._append(piece, entries)
        return piece

    def with_prompt(
        self, first_token: FirstToken, prompt_entries: Iterable[DecodedLogprobs], entries: Iterable[DecodedLogprobs]
    ) -> CompletionLogprobs:
        """Return an echo's log-probabilities: the prompt's tokens first; the very first one has none."""
        piece = CompletionLogprobs([], [], [], [])
        self._append_token(piece, *first_token, None, None)
        self._append(piece, prompt_entries)
        self._append(piece, entries)
        return piece

    async def whole(
        self, first_token: FirstToken | None, prompt_entries: Sequence[DecodedLogprobs], entries: Sequence[DecodedLogprobs]
    ) -> CompletionLogprobs:
        """Return `with_prompt`, or `piece` without a first token, built in turns."""
        whole = CompletionLogprobs([], [], [], [])
        if first_token is not None:
            self._append_token(whole, *first_token, None, None)

        def tops_of(some: Sequence[DecodedLogprobs]) -> list[dict[str, float] | None]:
            part = self.piece(some)
            whole.text_offset += part.text_offset
            whole.token_logprobs += part.token_logprobs
            whole.tokens += part.tokens
            return part.top_logprobs

        for own in (prompt_entries if first_token is not None else [], entries):
            whole.top_logprobs += await encoded_in_turns(own, tops_of)
        return whole

    def _append(self, piece: CompletionLogprobs, entries: Iterable[DecodedLogprobs]) -> None:
        for entry in entries:
            self._append_token(piece, entry.token_id, entry.token, _finite(entry.logprob), self._top(entry))

    def _append_token(
        self, piece: CompletionLogprobs, token_id: int, token: bytes, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        piece.text_offset.append(self._offset)
        piece.tokens.append(self._called(token_id, token))
        piece.token_logprobs.append(logprob)
        piece.top_logprobs.append(top)
        self._offset += sum(byte & 0xC0 != 0x80 for byte in token)  # characters, each counted at its first byte

    def _top(self, entry: DecodedLogprobs) -> dict[str, float]:
        """Return the best tokens by text, and the token itself; of two tokens with the same text, the likelier one is used."""
        top: dict[str, float] = {}
        best = zip(entry.top_token_ids[: self._num_top], entry.top_tokens, entry.top_logprobs, strict=False)
        for token_id, token, logprob in best:
            top.setdefault(self._called(token_id, token), _finite(logprob))
        top.setdefault(self._called(entry.token_id, entry.token), _finite(entry.logprob))
        return top


async def prompt_logprobs(entries: Sequence[DecodedLogprobs], num_top: int) -> PromptLogprobs:
    """Return null for the first token, then for each token itself and the best at its position, by token id."""
    return [None, *await logprobs_by_id(entries, num_top)]


async def logprobs_by_id(entries: Sequence[DecodedLogprobs], num_top: int) -> PromptLogprobs:
    """Return for each token itself and the best at its position, by token id."""
    return await encoded_in_turns(entries, lambda some: _rows_by_id(some, num_top))


def _rows_by_id(entries: Iterable[DecodedLogprobs], num_top: int) -> PromptLogprobs:
    rows: PromptLogprobs = []
    for entry in entries:
        row = {entry.token_id: PromptLogprob(_finite(entry.logprob), entry.rank, token_text(entry.token))}
        best = zip(entry.top_token_ids[:num_top], entry.top_logprobs, entry.top_tokens, strict=False)
        for rank, (token_id, logprob, token) in enumerate(best, start=1):
            row.setdefault(token_id, PromptLogprob(_finite(logprob), rank, token_text(token)))
        rows.append(row)
    return rows


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
