"""A sequence in the scheduler: its tokens, how far they are computed, and the resources it holds.

Used by the scheduler process alone. Tokens that a dispatched step will sample are counted before they are known ("one step
ahead"). Three positions describe the progress:

    0 <= num_confirmed <= num_computed <= num_tokens <= max_total_tokens
         results back     dispatched      known tokens and num_unknown sampled ones in flight

With drafts a row may produce more than one token, and their number is unknown until its result arrives: `num_computed` and
`num_tokens` are then lower bounds, and both may be greater by up to `num_ahead`, the drafts in flight. Blocks are held for
them, too. A rejected draft leaves nothing to undo: the next row overwrites its keys and values.

The one scheduling rule is that `num_computed` chases `num_tokens`: prefill, its chunks, decode and recomputation after a
preemption all follow from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import msgspec

from engine.block_keys import BlockExtras
from engine.messages import Output, Rejected, SequenceRequest
from engine.scheduler.sequence_media import SequenceMedia
from engine.scheduler.states import SequenceStates

NO_SLOT = -1
START_BYTES = 512  # of a SlotStart besides its tokens, block ids and sampling parameters
START_BYTES_PER_TOKEN = 8  # the token and, at worst, a block id
Rank = tuple[int, int, int]
"""Place in line, priority, order of intake: among waiting sequences, the lowest goes first."""
POOLED_BYTES = 16  # of pooled output besides its float32 values, in a StepResult
LOGPROB_BYTES = 8  # a log-probability in a StepResult: a float32, and its token id or rank


def start_bytes(num_tokens: int, num_sampling_bytes: int = 0) -> int:
    """Return the most bytes of a SlotStart in a ring record."""
    return START_BYTES + START_BYTES_PER_TOKEN * num_tokens + num_sampling_bytes


class SequenceState(Enum):
    WAITING = "waiting"  # holds nothing
    RUNNING = "running"  # holds a slot and blocks, gets tokens
    LEAVING = "leaving"  # preempted: back to waiting when no step in flight has it
    FINISHED = "finished"  # slot and blocks are freed when no step in flight has it


class Reader(Protocol):
    """Destination of a sequence's outputs."""

    @property
    def is_slow(self) -> bool:
        """Whether outputs are waiting for room in the reader's ring."""

    def add(self, output: Output) -> None:
        """Send an output; always possible."""

    def reject(self, rejected: Rejected) -> None:
        """Send the rejection of a sequence that cannot be served; always possible."""


class Sequence(msgspec.Struct, eq=False):
    """One sequence of a request; `token_ids` is its prompt, then all outputs known so far."""

    request: SequenceRequest
    reader: Reader
    token_ids: array[int]
    num_prompt_tokens: int
    max_total_tokens: int  # the sequence ends here, whatever it samples
    rank: Rank
    num_sampling_bytes: int = 0  # its sampling parameters, encoded
    tokenizer_epoch: int = 0
    media: SequenceMedia | None = None  # parts of its prompt that are not causal text
    extras: BlockExtras | None = None  # what its block keys cover besides token ids
    num_pooled_bytes: int = 0  # pooled output in a StepResult; 0: it is not pooled
    is_pooled_whole: bool = False  # pooled from every token: after the worker dies, all must be computed again
    state: SequenceState = SequenceState.WAITING

    num_computed: int = 0
    num_confirmed: int = 0
    num_unknown: int = 0
    num_ahead: int = 0  # drafts in the dispatched steps
    num_wanted: int = 0  # drafts that would pay, as last reported by the worker
    num_in_flight: int = 0  # dispatched steps with a row of it

    slot: int = NO_SLOT
    is_started: bool = False  # the worker has the contents of the slot
    tables: list[list[int]] = []  # block ids, of each group of layers; 0: freed behind the window
    num_freed: list[int] = []  # leading blocks of each table
    states: SequenceStates | None = None  # slots of recurrent states; None: it holds none
    block_keys: list[bytes] = msgspec.field(default_factory=list)  # of the full blocks of known tokens, as far as needed
    num_indexed_blocks: int = 0
    generation: int = 0  # of the prefix index when the block table was started

    is_late: bool = False  # a step sampled no token for it: it gets no row until no step in flight has one
    num_tokens_to_compute: int = 0  # while it waits: tokens that are not cached
    awaits_grammar: bool = False  # the ranks have not compiled its grammar yet
    held_since_ns: int = 0  # of a new request: when it arrived; 0: not held
    num_cached_tokens: int = -1  # prompt tokens found in the cache at the first admission; -1 before it
    num_scored_prompt_tokens: int = 0  # prompt tokens with log-probabilities that were delivered, now or in an earlier attempt
    is_reporting: bool = False  # reports how much of its prompt is computed
    first_scheduled_ns: int = 0
    first_token_ns: int = 0

    @property
    def seniority(self) -> tuple[int, int]:
        """Arrival, then order of intake: among running sequences, the highest is preempted first."""
        return self.request.shared.arrival_ns, self.rank[2]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unknown

    @property
    def num_start_bytes(self) -> int:
        """Most bytes of this sequence's SlotStart."""
        return start_bytes(len(self.token_ids), self.num_sampling_bytes)

    def num_result_bytes(self, start: int, num_tokens: int) -> int:
        """Return the bytes that a StepResult carries for positions [start, start + num_tokens): prompt log-probabilities if
        wanted, and the pooled output with the last position."""
        if self.num_pooled_bytes:
            return self.num_pooled_bytes * (start + num_tokens >= self.num_prompt_tokens)
        if not self.wants_prompt_logprobs:
            return 0
        return num_tokens * LOGPROB_BYTES * (1 + self.request.sampling.num_prompt_logprobs)

    def num_tokens_within(self, num_result_bytes: int, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` from `start` on have results of at most `num_result_bytes` bytes."""
        if self.num_pooled_bytes:
            is_fitting = self.num_result_bytes(start, num_tokens) <= num_result_bytes
            return num_tokens if is_fitting else self.num_prompt_tokens - 1 - start
        each = self.num_result_bytes(start, 1)
        return min(num_tokens, num_result_bytes // each) if each else num_tokens

    @property
    def cannot_run(self) -> bool:
        """Whether its reader must catch up first, or steps in flight must return."""
        return self.reader.is_slow or self.is_late

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt must be computed, not found in the cache."""
        return self.request.sampling.num_prompt_logprobs >= 0 and self.num_scored_prompt_tokens < self.num_prompt_tokens - 1

    @property
    def is_computing_prompt(self) -> bool:
        """Whether it runs, and the KV of its prompt is not there yet for others to share."""
        return self.state is SequenceState.RUNNING and self.num_confirmed < self.num_prompt_tokens

    @property
    def num_reached(self) -> int:
        """Positions [0, num_reached) may be written by what is dispatched."""
        return min(self.num_computed + self.num_ahead, self.max_total_tokens)

    def drew_nothing(self, end: int, num_drafts: int) -> None:
        """Note that a step that should sample after position `end - 1` sampled no token, because its grammar mask was late. The
        state of recurrent layers has seen that position, so such a sequence goes back to the state before."""
        self.num_unknown -= 1
        self.num_ahead -= num_drafts
        if self.states is None:
            self.num_confirmed = max(self.num_confirmed, min(end, len(self.token_ids)) - 1)
        self.is_late = True

    def draw_again(self, first_position: Callable[[int], int]) -> None:
        """Continue from what is confirmed; no step in flight has the sequence."""
        if self.is_late:
            self.is_late = False
            self.num_computed = self._first_to_compute(first_position)

    def rollback_in_flight(self, first_position: Callable[[int], int]) -> None:
        """Return to what results have confirmed: the steps in flight are lost, and so is the worker's state of the slot."""
        self.num_in_flight = 0
        self.num_unknown = self.num_ahead = 0
        self.is_late = False
        # stays as it is otherwise: blocks before it may be freed
        self.num_confirmed = 0 if self.is_pooled_whole else self.num_confirmed
        self.num_computed = self._first_to_compute(first_position)
        self.is_started = False

    def _first_to_compute(self, first_position: Callable[[int], int]) -> int:
        """Return where the sequence goes on from what is confirmed, but not before its state."""
        return max(first_position(self.num_confirmed), self.states.position if self.states is not None else 0)

    def forget_blocks(self) -> list[list[int]]:
        """Reset to nothing computed; return the block tables, to be freed."""
        assert self.num_in_flight == 0
        tables, self.tables, self.num_freed = self.tables, [], []
        self.num_computed = self.num_confirmed = self.num_unknown = self.num_indexed_blocks = 0
        self.slot = NO_SLOT
        self.is_started = False
        return tables
