"""Decides which sequences run how many tokens in the next step, which are admitted, and which give way. Changes nothing itself.

Called by the scheduler once a step. The rule is one: `num_computed` chases `num_tokens`, in the sequences' order, under a
budget of tokens and blocks.

- Sequences that decode go first: each gets its token before any prompt. Where one lacks a block, the youngest running
  sequence is preempted (which may be that one itself), free blocks are kept for the one that lacks some, and later steps find
  the blocks that came free. One victim a step, and none while blocks are on their way back anyway.
- Prompts share the tokens that are left (`prefill_shares.py`), and as much time as they may take (`step_cost.py`): short ones
  get in beside a long one, which always makes progress. A source has a few long prompts in progress at a time; its others wait
  in their place, and hold up no other sequence.
- Where all slots are taken and a source without one has waited for some time, the source with the most gives one up.
- Waiting sequences are admitted by turns between sources (`fair_share.py`), while tokens, slots and blocks last; the first that
  lacks a slot or blocks ends the admission, so that small ones do not overtake it for ever. An admitted sequence gets all its
  blocks at once, and each running sequence is left one block to grow into: the next step does not evict what this one
  admitted.
- Sequences of one group (`n` > 1) wait until the first of them has computed the prompt, and then find it in the prefix cache.
- Sequences with a slow reader get nothing until it has caught up.
- Drafts get what is left after all that: tokens of the budget in the sequences' order, and blocks only where each running
  sequence still finds one. They delay no prompt and preempt no sequence: where a block is missing they give theirs up first.
- A sequence that lacks features of a picture or video waits in its place and holds up no other (`encoder_work.py`), and so does
  one with a grammar that the ranks are still compiling (`grammars.py`).
- Ranks that share experts: new requests are held for a while, and prefill may be kept apart from decode (`intake.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from engine.block_keys import hash_blocks
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.intake import Intake, StepKind
from engine.scheduler.prefill_shares import MIN_TOKENS, Prefill, share
from engine.scheduler.queues import SequenceQueue
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence_media import SequenceMedia
from engine.scheduler.step_cost import StepCost

MAX_LOOK = 64  # waiting sequences that are looked at for one step, where its tokens are already spoken for


class Limits(msgspec.Struct, frozen=True):
    """Limits of one step."""

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
    long_prefill_tokens: int = 0  # prompts with more left to compute are long, and get no more in a step; 0: see `is_long`
    max_partial_prefills: int = 0  # prompts that are computed in part; 0: no limit
    max_long_prefills: int = 1  # of a source, long prompts that are computed side by side

    def first_position(self, num_tokens: int) -> int:
        """Return the position at which a sequence goes on with its first `num_tokens` in the cache."""
        return max(0, num_tokens - self.num_overlap)

    def is_decoding(self, sequence: Sequence) -> bool:
        """Whether its answer has begun, and no more is to be computed than its newest token."""
        num_tokens = sequence.num_tokens
        return num_tokens > sequence.num_prompt_tokens and num_tokens - sequence.num_computed <= 1 + self.num_overlap

    def is_long(self, num_tokens: int) -> bool:
        """Return whether a prompt with so many tokens left to compute counts as long: by default, if no step takes it whole."""
        return num_tokens > (self.long_prefill_tokens or self.max_tokens)


class SequenceChunk(msgspec.Struct):
    """One sequence's part of a step: positions [start, start + num_tokens), and up to `num_drafts` behind them."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampling: bool
    num_drafts: int = 0

    @property
    def is_prefill(self) -> bool:
        """Whether the chunk begins a sequence, computes prompt tokens, or computes some behind them anew. Asked before it is
        dispatched."""
        sequence = self.sequence
        return not sequence.is_started or self.start < max(sequence.num_prompt_tokens, sequence.num_tokens - 1)

    @property
    def end(self) -> int:
        """Largest end of the chunk, with the drafts in flight. Asked before it is dispatched."""
        end = self.start + self.num_tokens + self.sequence.num_ahead + self.num_drafts
        return min(end, self.sequence.max_total_tokens)


class Admission(msgspec.Struct):
    """A waiting sequence that gets a slot, and the cached blocks that it starts with."""

    sequence: Sequence
    block_ids: list[int]


class SchedulerOutput(msgspec.Struct):
    """Decisions for a step, in this order: preempt, trim, admit, then compute the chunks."""

    preempted: Sequence | None = None
    trimmed: list[Sequence] = []  # hold blocks that were for drafts
    admitted: list[Admission] = []
    rows: list[SequenceChunk] = []
    kind: StepKind = StepKind.MIXED
    held_until_ns: int = 0  # new requests that have room are held until then; 0: there are none
    passed_over: Sequence | None = None  # what comes next of its prompt is not to be cut, and was more than the step had left


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
    cost: StepCost | None = None,
    passed_over: Sequence | None = None,
    starving_before_ns: int = 0,
) -> SchedulerOutput:
    """Plan the next step. `leaders` holds the sequence of each group that was admitted first; `num_leaving`
    sequences no longer run but hold their slots and blocks until the steps in flight are back; `is_readable` says whether the
    step finds the features of the unit with a hash. `kinds`: the first of them for which there is something to do; `intake`:
    None where nobody is held; `cost`: None where time does not matter; `passed_over`: by the last step;
    `starving_before_ns`: who arrived before and has nothing running may have a slot of another source."""
    held_until_ns = 0
    victim = slot_victim(running, waiting, limits.max_running - num_leaving, starving_before_ns) if not num_leaving else None
    for kind in kinds:
        scheduling = _Scheduling(pool, limits, is_readable, kind, cost or StepCost(0), passed_over)
        scheduling.output.preempted = victim
        has_blocks = scheduling.decode(running, can_preempt=not num_leaving)
        if kind.takes(is_prefill=True):
            num_slots = limits.max_running - len(running) - num_leaving if has_blocks else 0
            scheduling.prefill(running, waiting, leaders, num_slots, intake)
        if has_blocks:
            scheduling.draft(len(running) + len(scheduling.output.admitted))
        output = scheduling.output
        held_until_ns = output.held_until_ns = output.held_until_ns or held_until_ns
        if output.rows or output.preempted is not None or output.trimmed:
            break
    return output


def slot_victim(
    running: SequenceQueue, waiting: Iterable[Sequence], num_slots: int, starving_before_ns: int
) -> Sequence | None:
    """Return the sequence that gives up its slot: where all `num_slots` are taken and the source that is next has none of them,
    the youngest of the source with the most, if it has two or more. The oldest running sequence always stays."""
    if len(running) < max(2, num_slots):
        return None
    first = next(iter(waiting), None)
    if first is None or first.awaits_grammar or first.request.shared.arrival_ns >= starving_before_ns:
        return None
    counts: dict[str, int] = {}
    for sequence in running:
        counts[source_of(sequence)] = counts.get(source_of(sequence), 0) + 1
    most = max(counts.values())
    if most < 2 or source_of(first) in counts:
        return None
    return next((running[place] for place in range(len(running) - 1, 0, -1) if counts[source_of(running[place])] == most), None)


def source_of(sequence: Sequence) -> str:
    """The user: an API key or an address."""
    shared = sequence.request.shared
    return shared.source or shared.key


def next_row(sequence: Sequence, num_computed: int, budget: int) -> SequenceChunk | None:
    """The rule: as many of the tokens after `num_computed` as the budget allows, sampling where that reaches the last one."""
    num_tokens = sequence.num_tokens
    is_last = num_tokens >= sequence.max_total_tokens
    if is_last and num_computed >= sequence.num_prompt_tokens:
        return None  # what is under way reaches the sequence's end
    num_due = num_tokens - num_computed
    count = num_due if num_due <= budget else budget
    return SequenceChunk(sequence, num_computed, count, count == num_due and not is_last) if count > 0 else None


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
    block_ids = pool.prefix_cache.match(sequence.block_keys[: (len(sequence.token_ids) - 1) // block_size])
    return block_ids if media is None else block_ids[: media.num_hit_blocks(len(block_ids), block_size)]


class _Candidate(msgspec.Struct, eq=False):
    """A sequence with prompt tokens to compute. A waiting one has an `admission`, and takes its number of free blocks."""

    sequence: Sequence
    prefill: Prefill
    admission: Admission | None = None
    num_blocks: int = 0


class _Room(msgspec.Struct):
    """Budget that is left of a step."""

    num_tokens: int
    num_blocks: int
    num_start_bytes: int
    num_result_bytes: int


class _Scheduling:
    """A `SchedulerOutput` in the making, and what is left for it."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        is_readable: Callable[[bytes], bool],
        kind: StepKind,
        cost: StepCost,
        passed_over: Sequence | None,
    ) -> None:
        self.output = SchedulerOutput(kind=kind)
        self._left = _Room(limits.max_tokens, pool.num_free, limits.max_start_bytes, limits.max_result_bytes)
        self._num_drafts = limits.max_drafts
        self._lacks_blocks = False
        self._pool = pool
        self._limits = limits
        self._is_readable = is_readable
        self._cost = cost
        self._passed_over = passed_over

    def decode(self, running: SequenceQueue, can_preempt: bool) -> bool:
        """Rows of sequences that decode, and the victim where one lacks a block. False where blocks ran short."""
        has_blocks = True
        num_kept = 0  # tokens for what the last step had no room for
        if self._passed_over is not None and self._passed_over.media is not None:
            first, end = self._passed_over.media.longest_whole
            num_kept = end - first
        for sequence in running:
            if self._left.num_tokens <= num_kept:
                break
            if (
                sequence is self.output.preempted
                or sequence.cannot_run
                or not self._limits.is_decoding(sequence)
                or not (sequence.is_started or self._can_start(sequence))
            ):
                continue
            row = next_row(sequence, sequence.num_computed, self._left.num_tokens)
            if row is None or not self.output.kind.takes(is_prefill=row.is_prefill):
                continue
            num_new_blocks = num_blocks_for(row.end, self._limits.block_size) - len(sequence.block_ids)
            if num_new_blocks > self._left.num_blocks:
                if has_blocks and can_preempt and self.output.preempted is None and not self._trim(running):
                    self.output.preempted = running[-1]
                has_blocks = False
                self._left.num_blocks = 0
                continue
            self._left.num_blocks -= max(0, num_new_blocks)
            self._take(row)
        return has_blocks

    def prefill(
        self,
        running: SequenceQueue,
        waiting: Iterable[Sequence],
        leaders: Mapping[str, Sequence],
        num_slots: int,
        intake: Intake | None,
    ) -> None:
        """Rows of prompts: of running sequences, and of waiting ones where there is a slot. None of the latter where there is
        room for more and `intake` holds them."""
        has_streams = any(self._limits.is_decoding(sequence) for sequence in running)
        time_ns = self._cost.prompt_budget_ns(has_streams=has_streams)
        if self._left.num_tokens <= 0 or time_ns <= 0:
            return
        candidates = [found for sequence in running if (found := self._running_candidate(sequence)) is not None]
        num_running, left = len(candidates), msgspec.structs.replace(self._left)
        is_full = True
        if num_slots > 0:
            is_full = self._look(candidates, waiting, leaders, len(running), num_slots)
            if self._lacks_blocks:
                self._trim(running)
        self._left.num_blocks, self._left.num_start_bytes = left.num_blocks, left.num_start_bytes
        rows, num_rows = self.output.rows, len(self.output.rows)
        self._cap_long(candidates, self._cost.long_budget_ns(has_streams=has_streams))
        self._share(candidates, time_ns)
        is_full = is_full or self._left.num_tokens <= 0
        if intake is None or is_full or num_running or not self.output.admitted:
            return
        self.output.held_until_ns = intake.held_until_ns([each.sequence for each in self.output.admitted], leaders)
        if self.output.held_until_ns:  # they take nothing of this step
            del rows[num_rows:]
            self.output.admitted.clear()
            self._left, self._lacks_blocks = left, False

    def _running_candidate(self, sequence: Sequence) -> _Candidate | None:
        """None where it computes no prompt, or cannot now."""
        num_due = sequence.num_tokens - sequence.num_computed
        is_out = sequence is self.output.preempted or sequence.cannot_run
        if is_out or self._limits.is_decoding(sequence) or num_due <= 0:
            return None
        return _Candidate(sequence, self._prefill_of(sequence, sequence.num_computed))

    def _cap_long(self, candidates: list[_Candidate], time_ns: float) -> None:
        """Limit the long prompts of the step to `time_ns` together."""
        long = [each for each in candidates if self._is_long(each)]
        for each in long:
            prefill = each.prefill
            count = self._cost.num_tokens_within(prefill.start, time_ns / len(long))
            prefill.max_tokens = min(prefill.max_tokens, max(MIN_TOKENS, count))

    def _is_long(self, candidate: _Candidate) -> bool:
        """Long prompts stay long to their last tokens, which see the most keys."""
        sequence = candidate.sequence
        num_whole = 0 if candidate.admission else sequence.num_prompt_tokens - max(0, sequence.num_cached_tokens)
        return self._limits.is_long(max(candidate.prefill.num_due, num_whole))

    def _prefill_of(self, sequence: Sequence, start: int) -> Prefill:
        num_due = sequence.num_tokens - start
        most = self._limits.long_prefill_tokens if self._limits.is_long(num_due) else 0
        return Prefill(source_of(sequence), start, num_due, most or num_due)

    def _look(
        self,
        candidates: list[_Candidate],
        waiting: Iterable[Sequence],
        leaders: Mapping[str, Sequence],
        num_running: int,
        num_slots: int,
    ) -> bool:
        """Find waiting sequences that there is room for, apart from tokens. Return whether there is no room for more."""
        limits, new_groups = self._limits, set[str]()
        num_due = sum(each.prefill.num_due for each in candidates)
        num_long: dict[str, int] = {}
        for each in candidates:
            num_long[each.prefill.source] = num_long.get(each.prefill.source, 0) + limits.is_long(each.prefill.num_due)
        num_looks = 0
        for sequence in waiting:
            num_looks += num_due >= self._left.num_tokens
            self._lacks_blocks = self._left.num_blocks <= num_running
            if num_slots <= 0 or num_looks > MAX_LOOK or self._lacks_blocks or len(candidates) >= self._left.num_tokens:
                return True
            group_id = sequence.request.own.group_id
            if sequence.awaits_grammar:
                continue
            if sequence.reader.is_slow or (group_id and self._should_follow(sequence, leaders.get(group_id), new_groups)):
                continue
            block_ids = find_prefix(sequence, self._pool, limits)
            num_taken = num_blocks_for(sequence.num_tokens, limits.block_size) - len(block_ids)
            num_taken += self._pool.num_unused(block_ids)
            start = limits.first_position(len(block_ids) * limits.block_size)
            if sequence.media is not None and self._lacks_features(sequence.media, start):
                continue
            prefill = self._prefill_of(sequence, start)
            is_long = limits.is_long(prefill.num_due)
            if is_long and num_long.get(prefill.source, 0) >= limits.max_long_prefills:
                continue
            self._lacks_blocks = num_taken + num_running > self._left.num_blocks
            if self._lacks_blocks or not self._can_start(sequence):
                return True
            if limits.are_prompts_whole and num_due + prefill.num_due > self._left.num_tokens:
                return True
            candidates.append(_Candidate(sequence, prefill, Admission(sequence, block_ids), num_taken))
            self._left.num_blocks -= num_taken
            self._left.num_start_bytes -= sequence.num_start_bytes
            num_long[prefill.source] = num_long.get(prefill.source, 0) + is_long
            num_due += prefill.num_due
            num_slots -= 1
            num_running += 1
            new_groups.add(group_id)
        return num_slots <= 0 or self._left.num_blocks <= num_running

    def _share(self, candidates: list[_Candidate], time_ns: float) -> None:
        """Rows of the candidates, as far as tokens and time last."""
        if self._limits.are_prompts_whole:
            for each in candidates:
                each.prefill.num_tokens = each.prefill.num_due
        else:
            share([each.prefill for each in candidates], self._left.num_tokens, time_ns, self._cost)
        candidates.sort(key=lambda each: each.sequence is not self._passed_over)
        num_partial = 0
        for each in candidates:
            sequence, start, num_due = each.sequence, each.prefill.start, each.prefill.num_due
            if sequence is self._passed_over:
                each.prefill.num_tokens = self._left.num_tokens
            if not (sequence.is_started or self._can_start(sequence)):
                continue
            budget = self._budget(sequence, start, min(each.prefill.num_tokens, self._left.num_tokens))
            is_partial = budget < num_due
            if is_partial and each.admission is not None and num_partial >= (self._limits.max_partial_prefills or num_due):
                continue
            row = next_row(sequence, start, budget)
            if row is None:
                continue
            num_partial += is_partial
            if each.admission is not None:
                self.output.admitted.append(each.admission)
                self._left.num_blocks -= each.num_blocks
            self._take(row)
        if not any(row.is_prefill for row in self.output.rows) or self._passed_over is None:
            self.output.passed_over = next((each.sequence for each in candidates if self._is_passed_over(each)), None)

    def _is_passed_over(self, candidate: _Candidate) -> bool:
        """Return whether it got nothing because the next part of its prompt is not to be cut."""
        media = candidate.sequence.media
        return (
            media is not None
            and candidate.prefill.num_tokens > 0
            and not any(row.sequence is candidate.sequence for row in self.output.rows)
            and not self._lacks_features(media, candidate.prefill.start)
        )

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
            num_drafts = min(sequence.num_wanted, self._left.num_tokens, self._num_drafts)
            num_drafts = min(num_drafts, sequence.max_total_tokens - sequence.num_tokens - 1)
            if num_drafts <= 0 or row.is_prefill or not row.is_sampling:
                continue
            end = row.end
            num_blocks = max(len(sequence.block_ids), num_blocks_for(end, block_size))
            num_new_blocks = num_blocks_for(end + num_drafts, block_size) - num_blocks
            if num_new_blocks > (0 if self._lacks_blocks else max(0, self._left.num_blocks - num_running)):
                num_drafts, num_new_blocks = num_blocks * block_size - end, 0
            row.num_drafts = num_drafts
            self._left.num_tokens -= num_drafts
            self._num_drafts -= num_drafts
            self._left.num_blocks -= max(0, num_new_blocks)

    def _take(self, row: SequenceChunk) -> None:
        self._left.num_tokens -= row.num_tokens
        if not row.sequence.is_started:
            self._left.num_start_bytes -= row.sequence.num_start_bytes
        if row.sequence.num_pooled_bytes or row.sequence.wants_prompt_logprobs:
            self._left.num_result_bytes -= row.sequence.num_result_bytes(row.start, row.num_tokens)
        self.output.rows.append(row)

    def _budget(self, sequence: Sequence, start: int, budget: int) -> int:
        """Return how many of `budget` tokens the sequence may have from `start` on: the prompt part of the result must fit, and
        a prompt with media is cut where it may be, before the first missing features."""
        if sequence.num_pooled_bytes or sequence.wants_prompt_logprobs:
            budget = sequence.num_tokens_within(self._left.num_result_bytes, start, budget)
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
        """Return whether not even its next token can be computed: it waits in its place, and holds up no other."""
        return media.readable_end(start, start + 1, self._is_readable) == start

    def _can_start(self, sequence: Sequence) -> bool:
        """Return whether its SlotStart still fits the step's record; the intake made sure that it fits one alone."""
        return sequence.num_start_bytes <= self._left.num_start_bytes

    def _should_follow(self, sequence: Sequence, leader: Sequence | None, new_groups: set[str]) -> bool:
        """Better wait until another of the group has computed the prompt that they share."""
        is_computing = leader.is_computing_prompt if leader is not None else sequence.request.own.group_id in new_groups
        can_share = self._limits.has_prefix_cache and sequence.num_prompt_tokens > self._limits.block_size
        return is_computing and can_share and not sequence.wants_prompt_logprobs
