"""Which sequences run how many tokens in the next step, who is admitted, and who gives way. Decisions only: nothing is changed
here.

Called by the scheduler once a step. The rule is one: `num_computed` chases `num_tokens`, in the sequences' order, under a
budget of tokens and blocks.

- Running sequences go first. Where one lacks a block, the last in order is preempted (which may be that one itself), what is
  free is kept for the one that lacks it, and later steps find the blocks that came free. One victim a step, and none while
  blocks are on their way back anyway: nobody is thrown out in vain.
- Waiting sequences are admitted by turns between those whose they are (`turns.py`), while tokens, slots and blocks last; the
  first that does not fit ends the admission, so that nothing small overtakes it for ever. An admitted sequence gets the blocks
  of all its tokens at once, and each running sequence is left one block to grow into: what was let in is not thrown out by the
  next step.
- Samples of one group (`n` > 1) wait until the first of them has computed the prompt, and then find it in the prefix cache.
- Samples whose reader is slow get nothing until it has caught up.
- Drafts get what is left after all that: tokens of the budget in the sequences' order, and blocks only where each running
  sequence still finds one. They delay no prompt and preempt nobody: where a block is missing they give theirs up first.
- What lacks features of a picture or video waits in its place and holds up nobody (`encoder_work.py`), and so does what has a
  grammar that the ranks are still compiling (`grammars.py`).
- Ranks that share experts: newcomers are held for a while, and prefill may be kept apart from decode (`intake.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from engine.block_keys import hash_blocks
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.intake import Intake, StepKind
from engine.scheduler.queues import SequenceQueue
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence_media import SequenceMedia


class Limits(msgspec.Struct, frozen=True):
    """What one step may take."""

    max_tokens: int  # max_num_batched_tokens
    max_running: int  # batch slots
    max_start_bytes: int  # of SlotStarts, which must fit one ring record
    max_result_bytes: int  # of prompt log-probabilities, or of what is pooled: they must fit the record of a StepResult
    block_size: int
    has_prefix_cache: bool
    max_drafts: int = 0  # whose results must fit a record, too
    num_overlap: int = 0  # positions that are computed once more where a sequence goes on with what is in the cache
    are_prompts_whole: bool = False  # each is computed in one step
    mm_chunk_tokens: int = 0  # that a chunk of a prompt with media is meant to have; 0: max_tokens

    def first_position(self, num_tokens: int) -> int:
        """Where a sequence goes on whose first `num_tokens` are in the cache."""
        return max(0, num_tokens - self.num_overlap)


class Row(msgspec.Struct):
    """One sequence's part of a step: positions [start, start + num_tokens), and up to `num_drafts` behind them."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampling: bool
    num_drafts: int = 0

    @property
    def is_prefill(self) -> bool:
        """It begins, computes tokens of the prompt, or some behind it anew. To be asked before the row is dispatched."""
        sequence = self.sequence
        return not sequence.is_started or self.start < max(sequence.num_prompt_tokens, sequence.num_tokens - 1)

    @property
    def end(self) -> int:
        """Where the row ends at most, with the drafts that are under way. To be asked before it is dispatched."""
        end = self.start + self.num_tokens + self.sequence.num_ahead + self.num_drafts
        return min(end, self.sequence.max_total_tokens)


class Admission(msgspec.Struct):
    """A waiting sequence that gets a slot, and the cached blocks that it starts with."""

    sequence: Sequence
    block_ids: list[int]


class SchedulerOutput(msgspec.Struct):
    """What to do, in this order: preempt, trim, admit, then compute the rows."""

    preempted: Sequence | None = None
    trimmed: list[Sequence] = []  # hold blocks that were for drafts
    admitted: list[Admission] = []
    rows: list[Row] = []
    kind: StepKind = StepKind.MIXED
    held_until_ns: int = 0  # newcomers that have room are held until then; 0: there are none


def schedule(
    running: SequenceQueue,
    waiting: Iterable[Sequence],
    leaders: Mapping[str, Sequence],
    pool: BlockPool,
    limits: Limits,
    num_leaving: int = 0,
    is_readable: Callable[[bytes], bool] = bool,
    kinds: Iterable[StepKind] = (StepKind.MIXED,),
    intake: Intake | None = None,
) -> SchedulerOutput:
    """Plan the next step. `leaders` holds the sequence of each group that was admitted first; `num_leaving`
    sequences no longer run but hold their slots and blocks until the steps in flight are back; `is_readable` says whether the
    step finds the features of the unit with a hash. `kinds`: the first of them for which there is something to do; `intake`:
    None where nobody is held."""
    held_until_ns = 0
    for kind in kinds:
        scheduling = _Scheduling(pool, limits, is_readable, kind)
        has_blocks = scheduling.run(running, can_preempt=not num_leaving)
        if has_blocks and scheduling.num_tokens and kind.takes(is_prefill=True):
            num_slots = limits.max_running - len(running) - num_leaving
            scheduling.admit(waiting, leaders, running, num_slots, intake)
        if has_blocks:
            scheduling.draft(len(running) + len(scheduling.output.admitted))
        output = scheduling.output
        held_until_ns = output.held_until_ns = output.held_until_ns or held_until_ns
        if output.rows or output.preempted is not None or output.trimmed:
            break
    return output


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


def num_blocks_kept(sequence: Sequence, block_size: int) -> int:
    """Blocks of a running sequence that hold what is written, or will be by its next tokens; others were for drafts."""
    return num_blocks_for(max(sequence.num_reached, sequence.num_tokens), block_size)


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

    def __init__(self, pool: BlockPool, limits: Limits, is_readable: Callable[[bytes], bool], kind: StepKind) -> None:
        self.output = SchedulerOutput(kind=kind)
        self.num_tokens = limits.max_tokens
        self._num_blocks = pool.num_free
        self._num_start_bytes = limits.max_start_bytes
        self._num_result_bytes = limits.max_result_bytes
        self._num_drafts = limits.max_drafts
        self._lacks_blocks = False
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
            if row is None or not self.output.kind.takes(is_prefill=row.is_prefill):
                continue
            num_new_blocks = num_blocks_for(row.end, block_size) - len(sequence.block_ids)
            if num_new_blocks > 0:
                if num_new_blocks > self._num_blocks:
                    if has_blocks and can_preempt and not self._trim(running):
                        self.output.preempted = running[-1]
                    has_blocks = False
                    self._num_blocks = 0
                    continue
                self._num_blocks -= num_new_blocks
            self._take(row)
        return has_blocks

    def _trim(self, running: SequenceQueue) -> bool:
        """Whether drafts hold blocks: those of dispatched ones come free with their results, others at once."""
        block_size = self._limits.block_size
        holders = [each for each in running if len(each.block_ids) > num_blocks_for(each.num_tokens, block_size)]
        self.output.trimmed = [each for each in holders if len(each.block_ids) > num_blocks_kept(each, block_size)]
        return bool(holders)

    def draft(self, num_running: int) -> None:
        """Drafts for rows that continue an answer."""
        block_size = self._limits.block_size
        for row in self.output.rows:
            sequence = row.sequence
            num_drafts = min(sequence.num_wanted, self.num_tokens, self._num_drafts)
            num_drafts = min(num_drafts, sequence.max_total_tokens - sequence.num_tokens - 1)
            if num_drafts <= 0 or row.is_prefill or not row.is_sampling:
                continue
            end = row.end
            num_blocks = max(len(sequence.block_ids), num_blocks_for(end, block_size))
            num_new_blocks = num_blocks_for(end + num_drafts, block_size) - num_blocks
            if num_new_blocks > (0 if self._lacks_blocks else max(0, self._num_blocks - num_running)):
                num_drafts, num_new_blocks = num_blocks * block_size - end, 0
            row.num_drafts = num_drafts
            self.num_tokens -= num_drafts
            self._num_drafts -= num_drafts
            self._num_blocks -= max(0, num_new_blocks)

    def admit(
        self,
        waiting: Iterable[Sequence],
        leaders: Mapping[str, Sequence],
        running: SequenceQueue,
        num_slots: int,
        intake: Intake | None,
    ) -> None:
        """Admissions and their first rows; none of them where there is room for more and `intake` holds them."""
        rows, admitted = self.output.rows, self.output.admitted
        num_rows, prefills = len(rows), any(row.is_prefill for row in rows)
        is_full = self._fill(waiting, leaders, len(running), num_slots)
        if self._lacks_blocks:
            self._trim(running)
        if intake is None or is_full or prefills or not admitted:
            return
        self.output.held_until_ns = intake.held_until_ns([admission.sequence for admission in admitted], leaders)
        if self.output.held_until_ns:
            del rows[num_rows:]
            admitted.clear()

    def _fill(self, waiting: Iterable[Sequence], leaders: Mapping[str, Sequence], num_running: int, num_slots: int) -> bool:
        """Admit as many as there is room for. Whether there is none for more."""
        new_groups: set[str] = set()
        for sequence in waiting:
            self._lacks_blocks = self._num_blocks <= num_running
            if num_slots <= 0 or self.num_tokens <= 0 or self._lacks_blocks:
                return True
            group_id = sequence.request.group_id
            if sequence.awaits_grammar:
                continue
            if sequence.reader.is_slow or (group_id and self._should_follow(sequence, leaders.get(group_id), new_groups)):
                continue
            block_ids = find_prefix(sequence, self._pool, self._limits)
            num_new_blocks = num_blocks_for(sequence.num_tokens, self._limits.block_size) - len(block_ids)
            num_taken = num_new_blocks + self._pool.num_unused(block_ids)
            num_computed = self._limits.first_position(len(block_ids) * self._limits.block_size)
            if sequence.media is not None and self._lacks_features(sequence.media, num_computed):
                continue
            budget = self._budget(sequence, num_computed)
            self._lacks_blocks = num_taken + num_running > self._num_blocks
            if self._lacks_blocks or not budget or not self._can_start(sequence):
                return True
            row = next_row(sequence, num_computed, budget)
            assert row is not None, "a waiting sequence always has something to compute"
            self._take(row)
            self._num_blocks -= num_taken
            num_slots -= 1
            num_running += 1
            new_groups.add(group_id)
            self.output.admitted.append(Admission(sequence, block_ids))
        return num_slots <= 0 or self.num_tokens <= 0 or self._num_blocks <= num_running

    def _take(self, row: Row) -> None:
        self.num_tokens -= row.num_tokens
        if not row.sequence.is_started:
            self._num_start_bytes -= row.sequence.num_start_bytes
        if row.sequence.num_pooled_bytes or row.sequence.wants_prompt_logprobs:
            self._num_result_bytes -= row.sequence.num_result_bytes(row.start, row.num_tokens)
        self.output.rows.append(row)

    def _budget(self, sequence: Sequence, start: int) -> int:
        """How many of the tokens left the sequence may have from `start` on: what the result carries of its prompt must fit,
        and a prompt with media is cut where it may be, before the first features that are missing."""
        budget = self.num_tokens
        if sequence.num_pooled_bytes or sequence.wants_prompt_logprobs:
            budget = sequence.num_tokens_within(self._num_result_bytes, start, budget)
        if self._limits.are_prompts_whole and budget < sequence.num_tokens - start:
            return 0
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
