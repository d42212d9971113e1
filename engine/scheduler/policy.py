"""Decides which sequences run how many tokens in the next step, which are admitted, and which are preempted. Pure decisions.

Called by the scheduler once per step. One rule: `num_computed` chases `num_tokens`, in the sequences' order, under a budget of
tokens and blocks.

- Decoding sequences go first: each gets its token before any prompt. If one lacks a block, the youngest running sequence
  (perhaps itself) is preempted, free blocks are kept for the one that lacks some, and later steps find the freed blocks. One
  victim per step, and none while blocks are being freed anyway.
- Prompts share the remaining tokens (`prefill_shares.py`) and a limited time (`step_cost.py`): short ones run beside a long
  one, which always makes progress. A source has a few long prompts in progress at a time; its others wait in place without
  delaying other sequences.
- If all slots are taken and a source without one has waited for some time, the source with the most slots gives one up.
- Waiting sequences are admitted by turns between sources (`fair_share.py`) while tokens, slots and blocks last; the first one
  that lacks a slot or blocks ends the admission, so that small ones do not overtake it forever. An admitted sequence gets all
  its blocks at once, and one block is left for each running sequence to grow: the next step does not preempt what this one
  admitted.
- Layers with a window need few blocks of a long prompt at a time. They get them chunk by chunk; as many as they will hold are
  kept free until the prompt is computed.
- Sequences of one group (`n` > 1) wait until the first one has computed the prompt, and then find it in the prefix cache.
- Sequences with a slow reader pause until it has caught up.
- Drafts get what is left after that: tokens in the sequences' order, and blocks only while each running sequence still finds
  one. They delay no prompt and preempt no sequence: if a block is missing, they give theirs up first.
- A sequence that lacks features of an image or video waits in place without delaying others (`encoder_work.py`), and so does
  one with a grammar that the ranks are still compiling (`grammars.py`).
- A model with recurrent layers keeps the state of a prompt every so many tokens, so chunks may end there (`states.py`).
- Ranks that share experts: new requests are held for a while, and prefill may be kept apart from decode (`intake.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from engine.block_keys import hash_blocks
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.intake import Intake, StepKind
from engine.scheduler.limits import Limits
from engine.scheduler.page_needs import PageNeeds
from engine.scheduler.prefill_shares import MIN_TOKENS, Prefill, share
from engine.scheduler.prefix_cache import Prefix
from engine.scheduler.queues import SequenceQueue
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence_media import SequenceMedia
from engine.scheduler.states import StatePool
from engine.scheduler.step_cost import StepCost

MAX_LOOK = 64  # waiting sequences looked at for one step, while others take its tokens


class SequenceChunk(msgspec.Struct):
    """One sequence's part of a step: positions [start, start + num_tokens), followed by up to `num_drafts` draft tokens."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampling: bool
    num_drafts: int = 0

    @property
    def is_prefill(self) -> bool:
        """Whether the chunk begins a sequence, computes prompt tokens, or recomputes some after them. Valid before the
        dispatch."""
        sequence = self.sequence
        return not sequence.is_started or self.start < max(sequence.num_prompt_tokens, sequence.num_tokens - 1)

    @property
    def end(self) -> int:
        """Largest possible end of the chunk, with the drafts in flight. Valid before the dispatch."""
        end = self.start + self.num_tokens + self.sequence.num_ahead + self.num_drafts
        return min(end, self.sequence.max_total_tokens)


class Admission(msgspec.Struct):
    """A waiting sequence that gets a slot, and the cached blocks it starts with."""

    sequence: Sequence
    prefix: Prefix


class SchedulerOutput(msgspec.Struct):
    """Decisions for a step, applied in this order: preempt, trim, admit, then compute the chunks."""

    preempted: Sequence | None = None
    trimmed: list[Sequence] = []  # sequences that hold blocks for former drafts
    admitted: list[Admission] = []
    rows: list[SequenceChunk] = []
    kind: StepKind = StepKind.MIXED
    held_until_ns: int = 0  # until when fitting new requests are held; 0: none are
    passed_over: Sequence | None = None  # its prompt continues with a span that must not be cut and did not fit this step


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
    """Plan the next step.

    `leaders`: the first admitted sequence of each group. `num_leaving`: sequences that no longer run but hold slots and blocks
    until their steps are back. `is_readable`: whether the step finds the features of a unit, by hash. `kinds`: the first one
    with work is used. `intake`: None if no request is held. `cost`: None if time does not matter. `passed_over`: by the last
    step. `starving_before_ns`: a source without a running sequence may take a slot of another source for a sequence that
    arrived earlier than this.
    """
    held_until_ns = 0
    victim = slot_victim(running, waiting, limits.max_running - num_leaving, starving_before_ns) if not num_leaving else None
    for kind in kinds:
        scheduling = _Scheduling(pool, limits, is_readable, kind, cost or StepCost(0), passed_over)
        scheduling.output.preempted = victim
        has_blocks = scheduling.decode(running, can_preempt=not num_leaving)
        if kind.takes(is_prefill=True):
            num_slots = limits.max_running - len(running) - num_leaving if has_blocks else 0
            scheduling.prefill(running, waiting, leaders, num_slots, intake, can_preempt=not num_leaving)
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
    """Return the sequence that gives up its slot: if all `num_slots` are taken and the next source has none of them, the
    youngest sequence of the source with the most, if that has at least two. The oldest running sequence always stays."""
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
    """Return the user of a sequence: an API key or an address."""
    shared = sequence.request.shared
    return shared.source or shared.key


def next_row(sequence: Sequence, num_computed: int, budget: int) -> SequenceChunk | None:
    """Return the next chunk: as many tokens after `num_computed` as the budget allows, sampling if it reaches the last one."""
    num_tokens = sequence.num_tokens
    is_last = num_tokens >= sequence.max_total_tokens
    if is_last and num_computed >= sequence.num_prompt_tokens:
        return None  # the steps in flight reach the sequence's end
    num_due = num_tokens - num_computed
    count = num_due if num_due <= budget else budget
    return SequenceChunk(sequence, num_computed, count, count == num_due and not is_last) if count > 0 else None


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for `num_tokens` positions."""
    return -(-num_tokens // block_size)


def num_blocks_kept(sequence: Sequence, block_size: int) -> int:
    """Return how many blocks of a running sequence are written or will be by its next tokens; the others were for drafts."""
    return num_blocks_for(max(sequence.num_reached, sequence.num_tokens), block_size)


def find_prefix(sequence: Sequence, pool: BlockPool, limits: Limits) -> Prefix:
    """Return the cached blocks that the sequence starts with: of a model with recurrent layers, those before a kept state. At
    least its last token is always left to compute."""
    if not limits.has_prefix_cache or sequence.wants_prompt_logprobs:
        return Prefix(0, [[] for _ in limits.groups])
    media, block_size = sequence.media, limits.block_size
    hash_blocks(sequence.token_ids, block_size, sequence.block_keys, len(sequence.token_ids), sequence.extras)
    keys = sequence.block_keys[: (len(sequence.token_ids) - 1) // block_size]
    shorten = None if media is None else partial(media.num_hit_blocks, block_size=block_size)
    if pool.states is not None:
        shorten = partial(_num_blocks_with_state, pool.states, keys, shorten)
    return pool.prefix_cache.match(keys, limits.first_needed, shorten)


def _num_blocks_with_state(states: StatePool, keys: list[bytes], shorten: Callable[[int], int] | None, num_blocks: int) -> int:
    return states.longest(keys, num_blocks if shorten is None else shorten(num_blocks))


class _Candidate(msgspec.Struct, eq=False):
    """A sequence with prompt tokens to compute. A waiting one has an `admission`, which uses free blocks."""

    sequence: Sequence
    prefill: Prefill
    admission: Admission | None = None
    num_pages: int = 0


class _Room(msgspec.Struct):
    """Remaining budget of a step."""

    num_tokens: int
    num_pages: int
    num_start_bytes: int
    num_result_bytes: int


class _Scheduling:
    """Builds a `SchedulerOutput` and tracks the remaining budget."""

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
        self._pages = PageNeeds(limits)
        self._num_free = pool.num_free  # pages, with those that prompts will need
        self._left = _Room(limits.max_tokens, self._num_free, limits.max_start_bytes, limits.max_result_bytes)
        self._num_drafts = limits.max_drafts
        self._lacks_blocks = False
        self._is_starved = False  # a running prompt found no block, because others still hold those that it freed
        self._pool = pool
        self._limits = limits
        self._is_readable = is_readable
        self._cost = cost
        self._passed_over = passed_over

    def decode(self, running: SequenceQueue, can_preempt: bool) -> bool:
        """Schedule decoding sequences, and choose the victim if one lacks a block. Return False if blocks ran short."""
        has_blocks, block_size = True, self._limits.block_size
        self._left.num_pages -= self._pages.kept_for(running)
        num_kept = 0  # tokens reserved for a span that did not fit the last step
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
            end = row.end
            has_room = end <= len(sequence.tables[-1]) * block_size  # the shortest table
            num_new_pages = 0 if has_room else self._pages.new(sequence, end)
            if num_new_pages and num_new_pages > self._left.num_pages:
                if has_blocks and can_preempt and self.output.preempted is None and not self._trim(running):
                    self.output.preempted = running[-1]
                has_blocks = False
                self._left.num_pages = 0
                continue
            self._left.num_pages -= num_new_pages
            self._num_free -= num_new_pages
            self._take(row)
        return has_blocks

    def prefill(
        self,
        running: SequenceQueue,
        waiting: Iterable[Sequence],
        leaders: Mapping[str, Sequence],
        num_slots: int,
        intake: Intake | None,
        *,
        can_preempt: bool,
    ) -> None:
        """Schedule prompts: of running sequences, and of waiting ones if there is a slot. Waiting ones get nothing if there is
        room for more and `intake` holds them. If nothing runs for lack of blocks, choose a victim."""
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
        self._left.num_pages, self._left.num_start_bytes = left.num_pages, left.num_start_bytes
        rows, num_rows = self.output.rows, len(self.output.rows)
        self._cap_long(candidates, self._cost.long_budget_ns(has_streams=has_streams))
        self._share(candidates, time_ns)
        if self._is_starved and not rows and can_preempt and self.output.preempted is None and not self._trim(running):
            self.output.preempted = running[-1]
        is_full = is_full or self._left.num_tokens <= 0
        if intake is None or is_full or num_running or not self.output.admitted:
            return
        self.output.held_until_ns = intake.held_until_ns([each.sequence for each in self.output.admitted], leaders)
        if self.output.held_until_ns:  # they use nothing of this step
            del rows[num_rows:]
            self.output.admitted.clear()
            self._left, self._lacks_blocks = left, False

    def _running_candidate(self, sequence: Sequence) -> _Candidate | None:
        """Return None if the sequence computes no prompt, or cannot now."""
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
        """Return whether a prompt is long. It stays long to its last tokens, which attend to the most keys."""
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
        """Find waiting sequences that fit, apart from tokens. Return whether no more would fit."""
        limits, new_groups = self._limits, set[str]()
        num_due = sum(each.prefill.num_due for each in candidates)
        num_long: dict[str, int] = {}
        for each in candidates:
            num_long[each.prefill.source] = num_long.get(each.prefill.source, 0) + limits.is_long(each.prefill.num_due)
        num_looks = 0
        for sequence in waiting:
            num_looks += num_due >= self._left.num_tokens
            self._lacks_blocks = self._left.num_pages <= num_running * limits.pages_per_block
            if num_slots <= 0 or num_looks > MAX_LOOK or self._lacks_blocks or len(candidates) >= self._left.num_tokens:
                return True
            group_id = sequence.request.own.group_id
            if sequence.awaits_grammar:
                continue
            if sequence.reader.is_slow or (group_id and self._should_follow(sequence, leaders.get(group_id), new_groups)):
                continue
            prefix = find_prefix(sequence, self._pool, limits)
            num_taken = self._pages.for_admission(sequence, prefix) + sum(map(self._pool.num_unused, prefix.tables))
            start = limits.first_position(prefix.num_blocks * limits.block_size)
            if sequence.media is not None and self._lacks_features(sequence.media, start):
                continue
            prefill = self._prefill_of(sequence, start)
            is_long = limits.is_long(prefill.num_due)
            if is_long and num_long.get(prefill.source, 0) >= limits.max_long_prefills:
                continue
            self._lacks_blocks = num_taken + num_running * limits.pages_per_block > self._left.num_pages
            if self._lacks_blocks or not self._can_start(sequence):
                return True
            if limits.are_prompts_whole and num_due + prefill.num_due > self._left.num_tokens:
                return True
            candidates.append(_Candidate(sequence, prefill, Admission(sequence, prefix), num_taken))
            self._left.num_pages -= num_taken
            self._left.num_start_bytes -= sequence.num_start_bytes
            num_long[prefill.source] = num_long.get(prefill.source, 0) + is_long
            num_due += prefill.num_due
            num_slots -= 1
            num_running += 1
            new_groups.add(group_id)
        return num_slots <= 0 or self._left.num_pages <= num_running * limits.pages_per_block

    def _share(self, candidates: list[_Candidate], time_ns: float) -> None:
        """Schedule the candidates, as far as tokens and time last."""
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
            budget = min(each.prefill.num_tokens, self._left.num_tokens)
            if each.admission is None and self._pages.has_windows:
                num_fitting = self._pages.num_tokens_within(sequence, start, self._num_free)
                self._is_starved |= num_fitting <= 0
                budget = min(budget, num_fitting)
            budget = self._cut(each, self._budget(sequence, start, budget))
            is_partial = budget < num_due
            if is_partial and each.admission is not None and num_partial >= (self._limits.max_partial_prefills or num_due):
                continue
            row = next_row(sequence, start, budget)
            if row is None:
                continue
            num_partial += is_partial
            if each.admission is not None:
                self.output.admitted.append(each.admission)
                self._left.num_pages -= each.num_pages
                self._num_free -= each.num_pages
            elif self._pages.has_windows:
                self._num_free -= self._pages.new(sequence, row.end)
            self._take(row)
        if not any(row.is_prefill for row in self.output.rows) or self._passed_over is None:
            self.output.passed_over = next((each.sequence for each in candidates if self._is_passed_over(each)), None)

    def _is_passed_over(self, candidate: _Candidate) -> bool:
        """Return whether it got nothing because the next part of its prompt must not be cut."""
        media = candidate.sequence.media
        return (
            media is not None
            and candidate.prefill.num_tokens > 0
            and not any(row.sequence is candidate.sequence for row in self.output.rows)
            and not self._lacks_features(media, candidate.prefill.start)
        )

    def _trim(self, running: SequenceQueue) -> bool:
        """Return whether drafts hold blocks: blocks of dispatched drafts are freed with their results, others at once."""
        block_size = self._limits.block_size
        holders = [each for each in running if len(each.tables[0]) > num_blocks_for(each.num_tokens, block_size)]
        self.output.trimmed = [each for each in holders if len(each.tables[0]) > num_blocks_kept(each, block_size)]
        return bool(holders)

    def draft(self, num_running: int) -> None:
        """Schedule drafts for chunks that continue an answer."""
        block_size = self._limits.block_size
        for row in self.output.rows:
            sequence = row.sequence
            num_drafts = min(sequence.num_wanted, self._left.num_tokens, self._num_drafts)
            num_drafts = min(num_drafts, sequence.max_total_tokens - sequence.num_tokens - 1)
            if num_drafts <= 0 or row.is_prefill or not row.is_sampling:
                continue
            end = row.end
            num_new_pages = self._pages.new(sequence, end + num_drafts) - self._pages.new(sequence, end)
            num_spare = self._left.num_pages - num_running * self._limits.pages_per_block
            if num_new_pages and (self._lacks_blocks or num_new_pages > num_spare):
                num_blocks = max(min(map(len, sequence.tables)), num_blocks_for(end, block_size))
                num_drafts, num_new_pages = num_blocks * block_size - end, 0
            row.num_drafts = num_drafts
            self._left.num_tokens -= num_drafts
            self._num_drafts -= num_drafts
            self._left.num_pages -= num_new_pages
            self._num_free -= num_new_pages

    def _take(self, row: SequenceChunk) -> None:
        self._left.num_tokens -= row.num_tokens
        if not row.sequence.is_started:
            self._left.num_start_bytes -= row.sequence.num_start_bytes
        if row.sequence.num_pooled_bytes or row.sequence.wants_prompt_logprobs:
            self._left.num_result_bytes -= row.sequence.num_result_bytes(row.start, row.num_tokens)
        self.output.rows.append(row)

    def _budget(self, sequence: Sequence, start: int, budget: int) -> int:
        """Return how many of `budget` tokens the sequence may compute from `start` on: the prompt part of the result must fit,
        and a prompt with media is cut at a legal position before the first missing features."""
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

    def _cut(self, candidate: _Candidate, budget: int) -> int:
        """Return how many of `budget` tokens the candidate computes, so that the states worth keeping are kept. Chunks with
        media are not cut again."""
        rules, sequence, start = self._limits.states, candidate.sequence, candidate.prefill.start
        if rules is None or budget <= 0 or (sequence.media is not None and start < sequence.media.end):
            return budget
        branch = 0 if sequence.states is None else sequence.states.branch
        if candidate.admission is not None:
            branch = candidate.admission.prefix.num_known_blocks * rules.block_size
        return rules.cut(start, start + budget, sequence.num_prompt_tokens, branch) - start

    def _lacks_features(self, media: SequenceMedia, start: int) -> bool:
        """Return whether not even its next token can be computed: it waits in place without delaying others."""
        return media.readable_end(start, start + 1, self._is_readable) == start

    def _can_start(self, sequence: Sequence) -> bool:
        """Return whether its SlotStart still fits the step's record; admission made sure that it fits an empty one."""
        return sequence.num_start_bytes <= self._left.num_start_bytes

    def _should_follow(self, sequence: Sequence, leader: Sequence | None, new_groups: set[str]) -> bool:
        """Return whether the sequence should wait until another of its group has computed their common prompt."""
        is_computing = leader.is_computing_prompt if leader is not None else sequence.request.own.group_id in new_groups
        limits = self._limits
        has_states = limits.states is None or limits.states.interval > 0
        can_share = limits.has_prefix_cache and has_states and sequence.num_prompt_tokens > limits.block_size
        return is_computing and can_share and not sequence.wants_prompt_logprobs
