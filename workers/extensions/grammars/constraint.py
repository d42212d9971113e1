"""Constraint of one sequence: the mask of its next token, computed from its tokens alone, without threads or slots.

Owned by `grammars.py`, used by one thread at a time.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from engine.messages import SamplingParams
from workers.extensions.grammars import limits

if TYPE_CHECKING:
    from engine.grammars.matcher import Matcher
    from engine.grammars.matching import Matching

_ALL = np.uint32(0xFFFFFFFF)
_NEVER = sys.maxsize  # a number of tokens that no answer reaches


class Constraint:
    """Constraint of one sequence. `masks`: uint32 [window, words], one bit per token; the first is for `position`, the next
    token of the answer. Not thread-safe."""

    def __init__(
        self, sampling: SamplingParams, num_prompt_tokens: int, token_ids: list[int], masks: np.ndarray, source: str = ""
    ) -> None:
        self.source = source
        assert sampling.grammar is not None
        self._grammar = sampling.grammar.text  # empty: only thinking is limited
        self._marker: list[int] = np.frombuffer(sampling.grammar.end_of_thinking, np.int32).tolist()
        self._ends = set(sampling.stop_token_ids)
        self._ignores_ends = sampling.ignore_eos
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids = token_ids  # of the answer
        is_free = sampling.is_thinking or not self._grammar
        self._bound_at = _NEVER if is_free and self._marker else 0  # number of tokens before the grammar applies
        self._begin = [] if sampling.is_thinking else np.frombuffer(sampling.grammar.begin_of_thinking, np.int32).tolist()
        self._max_thinking_tokens = sampling.grammar.max_thinking_tokens
        self._is_late = self._bound_at == _NEVER
        self._ended_at = _NEVER  # number of tokens, including the end token
        self._matcher: Matcher | None = None
        self._end_ids: list[int] = []
        self.masks = masks
        self.last_ns = 0  # time of its last mask
        self.pending: Future[None] | None = None  # the last work on it
        self._own_ns = self._ahead_ns = 0  # time spent on the answer and on drafts
        self.failed_at = -1  # no mask could be made for this position; -1: all succeeded
        self.error = ""

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self._num_prompt_tokens + len(self._token_ids)

    @property
    def _is_bound(self) -> bool:
        """Whether the grammar applies to the next token."""
        return self._bound_at != _NEVER

    @property
    def _is_ended(self) -> bool:
        return self._ended_at != _NEVER

    def prepare(self, matching: Matching) -> None:
        """Compile the grammar, which is not counted as time of this sequence."""
        if self._grammar and self._matcher is None:
            matching.prepare(self._grammar)

    def make(self, matching: Matching) -> None:
        """Make the mask of the next token."""
        self._make_again(matching)
        self._fill(0)

    def take(self, matching: Matching, position: int, token_ids: list[int]) -> None:
        """Take the tokens from `position` on, which replace rejected drafts."""
        self._go_back(matching, self.position - position)
        if self.failed_at > position:  # in a window that took another course
            self.failed_at, self.error = -1, ""
        for token_id in token_ids:
            self._consume(token_id)
        self._fill(0)

    def spent(self, num_ns: int, *, is_ahead: bool) -> None:
        """Add processor time."""
        if is_ahead:
            self._ahead_ns += num_ns
        else:
            self._own_ns += num_ns
            self.last_ns = num_ns

    @property
    def is_slow(self) -> bool:
        return self.last_ns > limits.SLOW_NS

    @property
    def is_ready(self) -> bool:
        """Whether the work on it is done."""
        return self.pending is None or self.pending.done()

    @property
    def is_over(self) -> bool:
        """Whether it has taken too much time and would delay the other sequences."""
        return self._own_ns > self._limit_ns

    @property
    def may_look_ahead(self) -> bool:
        return self._ahead_ns <= self._limit_ns and not self.is_slow

    @property
    def _limit_ns(self) -> int:
        return limits.BURST_NS + limits.TOKEN_NS * len(self._token_ids)

    def end(self) -> None:
        """Fail: there is no mask for the next position."""
        if self.failed_at < 0:
            self._fail(f"after {len(self._token_ids)} tokens it took more than {self._limit_ns // 1_000_000} ms")
            self.masks[0] = _ALL

    def num_allowed(self, matching: Matching, drafts: list[int]) -> int:
        """Return how many of the drafts are allowed, from the first on; none after an end."""
        return self._walk(matching, drafts, is_filling=False)

    def look_ahead(self, matching: Matching, drafts: list[int]) -> None:
        """Make the masks of the positions after each draft."""
        self._walk(matching, drafts, is_filling=True)

    def _walk(self, matching: Matching, drafts: list[int], *, is_filling: bool) -> int:
        if self.failed_at >= 0:
            return 0
        num_before = len(self._token_ids)
        for draft in drafts:
            if self.failed_at >= 0 or self._is_ended or not self._allows(draft):
                break
            self._consume(draft)
            if is_filling:
                self._fill(len(self._token_ids) - num_before)
        num_walked = len(self._token_ids) - num_before
        failure = self.failed_at, self.error
        self._go_back(matching, num_walked)
        if is_filling:
            self.failed_at, self.error = failure
        return num_walked

    def _allows(self, token_id: int) -> bool:
        if not self._is_bound or not self._grammar:
            return self._forced() in (None, token_id)
        assert self._matcher is not None
        if token_id in self._ends and self._matcher.is_accepting():
            return not self._ignores_ends or self._matcher.is_stopped()
        return self._matcher.num_valid([token_id]) > 0

    def _forced(self) -> int | None:
        """Return the next token of the forced end of thinking, or None while the thinking budget lasts."""
        if self._max_thinking_tokens < 0 or self._is_bound:
            return None
        known, num_begin = self._token_ids, len(self._begin)
        num_over = len(known) - num_begin - self._max_thinking_tokens
        if num_over < 0 or known[:num_begin] != self._begin:
            return None
        sizes = range(min(num_over, len(self._marker) - 1), 0, -1)
        return self._marker[next((size for size in sizes if known[-size:] == self._marker[:size]), 0)]

    def _consume(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if self._is_ended or self.failed_at >= 0:
            return
        if not self._is_bound:
            if self._token_ids[-len(self._marker) :] == self._marker:
                self._bound_at = len(self._token_ids)
        elif token_id in self._ends:
            self._ended_at = len(self._token_ids)
        elif self._matcher is not None and not self._matcher.consume(token_id):
            self._fail(self._matcher.error())

    def _num_matched(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens the matcher has."""
        return max(0, min(num_tokens, self._ended_at - 1) - self._bound_at)

    def _go_back(self, matching: Matching, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens. A matcher that hit a limit is unusable and is replaced."""
        if not num_tokens:
            return
        num_left = len(self._token_ids) - num_tokens
        num_matched = self._num_matched(len(self._token_ids)) - self._num_matched(num_left)
        del self._token_ids[num_left:]
        self.failed_at, self.error = -1, ""
        if self._matcher is not None and (self._matcher.is_error() or not self._matcher.rollback(num_matched)):
            self._make_again(matching)
            return
        if self._is_late and self._bound_at > num_left:
            self._bound_at = _NEVER
        if self._ended_at > num_left:
            self._ended_at = _NEVER

    def _make_again(self, matching: Matching) -> None:
        self._matcher = matching.matcher(self._grammar) if self._grammar else None
        self._end_ids = matching.tokens.end_ids
        known, self._token_ids = self._token_ids, []
        self._bound_at, self._ended_at = _NEVER if self._is_late else 0, _NEVER
        for token_id in known:
            self._consume(token_id)

    def _fill(self, place: int) -> None:
        """Make the mask of the next position, at this place of the window."""
        mask = self.masks[place]
        forced = self._forced()
        if forced is not None:
            mask[:] = 0
            _set(mask, {forced})
            return
        if self.failed_at >= 0 or not self._is_bound or not self._grammar:
            mask[:] = _ALL
            return
        assert self._matcher is not None
        if self._is_ended or (self._matcher.is_stopped() and not self._matcher.is_error()):
            self._allow_ends_alone(mask)
            return
        self._matcher.fill_mask(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._fail(self._matcher.error())
            mask[:] = _ALL
        elif self._matcher.is_accepting():
            if self._ignores_ends:
                _clear(mask, self._end_ids)
            else:
                _set(mask, self._ends)
            if not mask.any():
                self._allow_ends_alone(mask)

    def _allow_ends_alone(self, mask: np.ndarray) -> None:
        mask[:] = 0
        _set(mask, self._ends)

    def _fail(self, error: str) -> None:
        self.failed_at, self.error = self.position, error.partition("\n")[0] or "unknown"


def _set(mask: np.ndarray, token_ids: set[int]) -> None:
    for token_id in token_ids:
        if token_id // 32 < len(mask):
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: np.ndarray, token_ids: list[int]) -> None:
    for token_id in token_ids:
        mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
