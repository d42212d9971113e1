"""Log-probabilities in the three shapes that clients expect: OpenAI's for completions and for chats, vLLM's for prompts.

Pure functions, called by the api process's completion handlers.
"""

from __future__ import annotations

from collections.abc import Iterable

from api.schemas.responses import ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from engine.messages import DecodedLogprobs

LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON cannot say; OpenAI's and vLLM's value


def token_text(token: bytes) -> str:
    """A token as text; one that is a part of a character as OpenAI writes it: `bytes:\\xe2\\x82`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(entries: Iterable[DecodedLogprobs], num_top: int) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                token_text(entry.token),
                _finite(entry.logprob),
                list(entry.token),
                [
                    TopLogprob(token_text(token), _finite(logprob), list(token))
                    for token, logprob in zip(entry.top_tokens[:num_top], entry.top_logprobs, strict=False)
                ],
            )
            for entry in entries
        ]
    )


class CompletionLogprobsBuilder:
    """Builds one choice's log-probabilities piece by piece; `text_offset` counts characters from the start of its text."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def piece(self, entries: Iterable[DecodedLogprobs]) -> CompletionLogprobs:
        piece = CompletionLogprobs([], [], [], [])
        self._append(piece, entries)
        return piece

    def with_prompt(
        self, first_token: bytes, prompt_entries: Iterable[DecodedLogprobs], entries: Iterable[DecodedLogprobs]
    ) -> CompletionLogprobs:
        """An echo: the prompt's tokens first, of which nothing predicts the very first."""
        piece = CompletionLogprobs([], [], [], [])
        self._append_token(piece, first_token, None, None)
        self._append(piece, prompt_entries)
        self._append(piece, entries)
        return piece

    def _append(self, piece: CompletionLogprobs, entries: Iterable[DecodedLogprobs]) -> None:
        for entry in entries:
            self._append_token(piece, entry.token, _finite(entry.logprob), self._top(entry))

    def _append_token(
        self, piece: CompletionLogprobs, token: bytes, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        piece.text_offset.append(self._offset)
        piece.tokens.append(token_text(token))
        piece.token_logprobs.append(logprob)
        piece.top_logprobs.append(top)
        self._offset += sum(byte & 0xC0 != 0x80 for byte in token)  # characters, each counted at its first byte

    def _top(self, entry: DecodedLogprobs) -> dict[str, float]:
        """The best by text, and the token itself; where two tokens read the same, the likelier one counts."""
        top: dict[str, float] = {}
        for token, logprob in zip(entry.top_tokens[: self._num_top], entry.top_logprobs, strict=False):
            top.setdefault(token_text(token), _finite(logprob))
        top.setdefault(token_text(entry.token), _finite(entry.logprob))
        return top


def prompt_logprobs(entries: Iterable[DecodedLogprobs], num_top: int) -> PromptLogprobs:
    """Null for the first token, then per token itself and the best at its position, by token id."""
    rows: PromptLogprobs = [None]
    for entry in entries:
        row = {entry.token_id: PromptLogprob(_finite(entry.logprob), entry.rank, token_text(entry.token))}
        best = zip(entry.top_token_ids[:num_top], entry.top_logprobs, entry.top_tokens, strict=False)
        for rank, (token_id, logprob, token) in enumerate(best, start=1):
            row.setdefault(token_id, PromptLogprob(_finite(logprob), rank, token_text(token)))
        rows.append(row)
    return rows


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
