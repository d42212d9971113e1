"""Which sequences run how many tokens in the next step, who is admitted, and who gives way. Decisions only: nothing is changed
here.

Called by the scheduler once a step. The rule is one: `num_computed` chases `num_tokens`, in the sequences' order, under a
budget of tokens and blocks.

- Running sequences go first. Where one lacks a block, the last in order is preempted (which may be that one itself), what is
  free is kept for the one that lacks it, and later steps find the blocks that came free. One victim a step, and none while
  blocks are on their way back anyway: nobody is thrown out in vain.
- Waiting sequences are admitted in order while tokens, slots and blocks last; the first that does not fit ends the admission,
  so that nothing small overtakes it for ever. An admitted sequence gets the blocks of all its tokens at once, and each running
  sequence is left one block to grow into: what was let in is not thrown out by the next step.
- Samples of one group (`n` > 1) wait until the first of them has computed the prompt, and then find it in the prefix cache.
- Samples whose reader is slow get nothing until it has caught up.
- What lacks features of a picture or video waits in its place and holds up nobody (`encoder_work.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from engine.block_keys import hash_blocks
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.queues import SequenceQueue
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence_media import SequenceMedia


class Limits(msgspec.Struct, frozen=True):
    """What one step may take."""

    max_tokens: int  # max_num_batched_tokens
    max_running: int  # batch slots
    max_start_bytes: int  # of SlotStarts, which must fit one ring record
    max_result_bytes: int  # of prompt log-probabilities, which must fit the record of a StepResult
    block_size: int
    has_prefix_cache: bool
    mm_chunk_tokens: int = 0  # that a chunk of a prompt with media is meant to have; 0: max_tokens


class Row(msgspec.Struct):
    """One sequence's part of a step: positions [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampling: bool


class Admission(msgspec.Struct):
    """A waiting sequence that gets a slot, and the cached blocks that it starts with."""

    sequence: Sequence
    block_ids: list[int]


class SchedulerOutput(msgspec.Struct):
    """What to do, in this order: preempt, admit, then compute the rows."""

    preempted: Sequence | None = None
    admitted: list[Admission] = []
    rows: list[Row] = []


def schedule(
    running: SequenceQueue,
    waiting: Iterable[Sequence],
    leaders: Mapping[str, Sequence],
    pool: BlockPool,
    limits: Limits,
    num_leaving: int = 0,
    is_readable: Callable[[bytes], bool] = bool,
) -> SchedulerOutput:
    """Plan the next step. `leaders` holds the sequence of each group that was admitted first; `num_leaving`
    sequences no longer run but hold their slots and blocks until the steps in flight are back; `is_readable` says whether the
    step finds the features of the unit with a hash."""
    scheduling = _Scheduling(pool, limits, is_readable)
    if scheduling.run(running, can_preempt=not num_leaving) and scheduling.num_tokens:
        scheduling.admit(waiting, leaders, len(running), limits.max_running - len(running) - num_leaving)
    return scheduling.output


def next_row(sequence: Sequence, num_computed: int, budget: int) -> Row | None:
    """The rule: as many of the tokens after `num_computed` as the budget allows, sampling where that reaches the last one."""
    num_tokens = sequence.num_tokens
    is_last = num_tokens >= sequence.max_total_tokens
    if is_last and num_computed >= sequence.num_prompt_tokens:
        return None  # what is under way reaches the sequence's end
    num_due = num_tokens - num_computed
    count = num_due if num_due <= budget else budget
    return Row(sequence, num_computed, count, count == num_due and not is_last) if count > 0 else None


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


def find_prefix(sequence: Sequence, pool: BlockPool, limits: Limits) -> list[int]:
    """The cached blocks that the sequence starts with. At least its last token is always left to compute."""
    if not limits.has_prefix_cache or sequence.wants_prompt_logprobs:
        return []
    media, block_size = sequence.media, limits.block_size
    hash_blocks(sequence.token_ids, block_size, sequence.block_keys, len(sequence.token_ids), sequence.extras)
    block_ids = pool.match(sequence.block_keys[: (len(sequence.token_ids) - 1) // block_size])
    return block_ids if media is None else block_ids[: media.num_hit_blocks(len(block_ids), block_size)]


class _Scheduling:
    """A `SchedulerOutput` in the making, and what is left for it."""

    def __init__(self, pool: BlockPool, limits: Limits, is_readable: Callable[[bytes], bool]) -> None:
        self.output = SchedulerOutput()
        self.num_tokens = limits.max_tokens
        self._num_blocks = pool.num_free
        self._num_start_bytes = limits.max_start_bytes
        self._num_result_bytes = limits.max_result_bytes
        self._pool = pool
        self._limits = limits
        self._is_readable = is_readable

    def run(self, running: SequenceQueue, can_preempt: bool) -> bool:
        """Rows for what runs. False where blocks ran short."""
        has_blocks = True
        block_size = self._limits.block_size
        for sequence in running:
            if self.num_tokens <= 0 or sequence is self.output.preempted:
                break
            if sequence.reader.is_slow or not (sequence.is_started or self._can_start(sequence)):
                continue
            row = next_row(sequence, sequence.num_computed, self._budget(sequence, sequence.num_computed))
            if row is None:
                continue
            num_new_blocks = num_blocks_for(row.start + row.num_tokens, block_size) - len(sequence.block_ids)
            if num_new_blocks > 0:
                if num_new_blocks > self._num_blocks:
                    if has_blocks and can_preempt:
                        self.output.preempted = running[-1]
                    has_blocks = False
                    self._num_blocks = 0
                    continue
                self._num_blocks -= num_new_blocks
            self._take(row)
        return has_blocks

    def admit(self, waiting: Iterable[Sequence], leaders: Mapping[str, Sequence], num_running: int, num_slots: int) -> None:
        """Admissions and their first rows."""
        new_groups: set[str] = set()
        for sequence in waiting:
            if num_slots <= 0 or self.num_tokens <= 0 or self._num_blocks <= num_running:
                return
            group_id = sequence.request.group_id
            if sequence.reader.is_slow or (group_id and self._should_follow(sequence, leaders.get(group_id), new_groups)):
                continue
            block_ids = find_prefix(sequence, self._pool, self._limits)
            num_new_blocks = num_blocks_for(sequence.num_tokens, self._limits.block_size) - len(block_ids)
            num_taken = num_new_blocks + self._pool.num_unused(block_ids)
            num_computed = len(block_ids) * self._limits.block_size
            if sequence.media is not None and self._lacks_features(sequence.media, num_computed):
                continue
            budget = self._budget(sequence, num_computed)
            if num_taken + num_running > self._num_blocks or not budget or not self._can_start(sequence):
                return
            row = next_row(sequence, num_computed, budget)
            assert row is not None, "a waiting sequence always has something to compute"
            self._take(row)
            self._num_blocks -= num_taken
            num_slots -= 1
            num_running += 1
            new_groups.add(group_id)
            self.output.admitted.append(Admission(sequence, block_ids))

    def _take(self, row: Row) -> None:
        self.num_tokens -= row.num_tokens
        if not row.sequence.is_started:
            self._num_start_bytes -= row.sequence.num_start_bytes
        if row.sequence.wants_prompt_logprobs:
            self._num_result_bytes -= row.num_tokens * row.sequence.num_result_bytes
        self.output.rows.append(row)

    def _budget(self, sequence: Sequence, start: int) -> int:
        """How many of the tokens left the sequence may have from `start` on: the log-probabilities of its prompt must fit the
        result, and a prompt with media is cut where it may be, before the first features that are missing."""
        budget = self.num_tokens
        if sequence.wants_prompt_logprobs:
            budget = min(budget, self._num_result_bytes // sequence.num_result_bytes)
        media = sequence.media
        if media is None or start >= media.end or budget <= 0:
            return budget
        max_tokens = self._limits.max_tokens
        target = self._limits.mm_chunk_tokens or max_tokens
        end = media.chunk_end(start, len(sequence.token_ids), target, max_tokens, budget)
        return media.readable_end(start, end, self._is_readable) - start

    def _lacks_features(self, media: SequenceMedia, start: int) -> bool:
        """Not even its next token can be computed: it waits in its place, and holds up nobody."""
        return media.readable_end(start, start + 1, self._is_readable) == start

    def _can_start(self, sequence: Sequence) -> bool:
        """Its SlotStart still fits the step's record; the intake has seen to it that it fits one alone."""
        return sequence.num_start_bytes <= self._num_start_bytes

    def _should_follow(self, sequence: Sequence, leader: Sequence | None, new_groups: set[str]) -> bool:
        """Better wait until another of the group has computed the prompt that they share."""
        is_computing = leader.is_computing_prompt if leader is not None else sequence.request.group_id in new_groups
        can_share = self._limits.has_prefix_cache and sequence.num_prompt_tokens > self._limits.block_size
        return is_computing and can_share and not sequence.wants_prompt_logprobs
