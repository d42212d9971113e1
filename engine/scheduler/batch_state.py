"""All sequences of the scheduler: which wait, which run, and the slots and blocks they hold.

Used by the scheduler process alone; applies the plans of `policy.py` and the results of steps. The slot and blocks of a
sequence that ended or was preempted are freed when the last step in flight with a row of it is over: until then a rank may
still write to them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.block_keys import ROOT, hash_blocks
from engine.messages import SequenceRequest
from engine.scheduler.block_pool import NO_BLOCK, BlockPool
from engine.scheduler.limits import Limits
from engine.scheduler.policy import Admission, find_prefix, num_blocks_kept
from engine.scheduler.prefix_cache import CachedBlock
from engine.scheduler.queues import RunningQueue, WaitingQueue
from engine.scheduler.sequence import Sequence, SequenceState
from engine.scheduler.states import StateUse

MAX_REMEMBERED_HITS = 8192


class BatchState:
    """The sequences by id, the two queues, free slots, the block pool and the leaders of groups."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        on_stored: Callable[[list[CachedBlock]], None],
        num_wanted_by_new_requests: int = 0,
    ) -> None:
        """`num_wanted_by_new_requests`: drafts of a new sequence, until a worker says how many pay."""
        self.num_wanted_by_new_requests = num_wanted_by_new_requests
        self.limits = limits
        self.pool = pool
        self.sequences: dict[str, Sequence] = {}
        self.running = RunningQueue()
        self.waiting = WaitingQueue()
        self.leaders: dict[str, Sequence] = {}
        self.num_with_media = 0  # of the sequences
        self._hits: dict[str, int] = {}  # cached tokens of the sequences that ended last, by request id
        self._leaving: set[Sequence] = set()  # LEAVING or FINISHED, with steps in flight
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        # slots with a sequence completed since the last step, and its tokens; without those that must stay private (salted)
        self.ended: list[tuple[int, int]] = []
        self._on_stored = on_stored
        self.windowed = [(number, group) for number, group in enumerate(limits.groups) if group.window]

    @property
    def num_leaving(self) -> int:
        """Sequences that no longer run but still hold a slot and blocks."""
        return len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """All waiting sequences: in the queue, held at the intake, or leaving the batch after a preemption."""
        return self.waiting.num_waiting + sum(sequence.state is SequenceState.LEAVING for sequence in self._leaving)

    def num_waiting_of(self, source: str) -> tuple[int, int]:
        """Return the number of waiting sequences, and of those from `source`."""
        return self.num_waiting, self.waiting.num_of(source)

    def add(self, sequence: Sequence, is_new_request: bool = True) -> None:
        """Add a sequence from the intake; one that replaces an earlier attempt is no new request."""
        assert sequence.request.own.request_id not in self.sequences
        self.sequences[sequence.request.own.request_id] = sequence
        self.num_with_media += sequence.media is not None
        self._estimate(sequence)
        if is_new_request:
            self.waiting.add_new_request(sequence)
        else:
            self.waiting.push(sequence)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_tokens_to_compute(self) -> int:
        """Prompt tokens of waiting sequences left to compute, without those known to be cached."""
        return self.waiting.num_tokens_to_compute + sum(
            max(0, sequence.num_prompt_tokens - sequence.num_computed) for sequence in self.running
        )

    def _estimate(self, sequence: Sequence) -> None:
        """Estimate from the current cache how many tokens of a waiting sequence have to be computed."""
        num_hits = find_prefix(sequence, self.pool, self.limits).num_blocks * self.limits.block_size
        sequence.num_tokens_to_compute = sequence.num_tokens - num_hits

    def admit(self, admissions: list[Admission]) -> None:
        """Give waiting sequences their slots and, in layers that see all keys, the blocks of all their tokens."""
        for admission in admissions:  # before anything is allocated, which might evict the cached blocks
            for table in admission.prefix.tables:
                self.pool.acquire(table)
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        sequence = admission.sequence
        self.waiting.remove(sequence)
        num_hit_blocks, tables = admission.prefix.num_blocks, admission.prefix.tables
        num_hit_tokens = num_hit_blocks * self.limits.block_size
        num_blocks = -(-sequence.num_tokens // self.limits.block_size)
        for number, group in enumerate(self.limits.groups):
            if not group.window:
                tables[number] += self.pool.allocate(num_blocks - num_hit_blocks, number)
        sequence.tables = tables
        sequence.num_freed = [self.limits.first_needed(group, num_hit_blocks) for group in self.limits.groups]
        if self.pool.states is not None:
            key = sequence.block_keys[num_hit_blocks - 1] if num_hit_blocks else b""
            sequence.states = self.pool.states.start(key, admission.prefix.num_known_blocks * self.limits.block_size)
        sequence.num_computed = sequence.num_confirmed = self.limits.first_position(num_hit_tokens)
        sequence.num_indexed_blocks = num_hit_blocks
        sequence.generation = self.pool.prefix_cache.generation
        sequence.slot = self._free_slots.pop()
        sequence.state = SequenceState.RUNNING
        sequence.num_wanted = self.num_wanted_by_new_requests
        sequence.held_since_ns = 0
        self.running.push(sequence)
        self.waiting.began(sequence)
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = min(num_hit_tokens, sequence.num_prompt_tokens)
        leader = self.leaders.get(sequence.request.own.group_id)
        if sequence.request.own.group_id and (leader is None or leader.state is not SequenceState.RUNNING):
            self.leaders[sequence.request.own.group_id] = sequence

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Make the block tables hold `num_tokens` positions; return the group and index of each new block."""
        num_blocks, new = -(-num_tokens // self.limits.block_size), []
        for number, table in enumerate(sequence.tables):
            first = len(table)
            if first < num_blocks:
                table += self.pool.allocate(num_blocks - first, number)
                new += [(number, index) for index in range(first, num_blocks)]
        return new

    def free_behind_windows(self, sequence: Sequence) -> None:
        """Free the blocks that no later step reads, even if those in flight are lost."""
        position = self.limits.first_position(sequence.num_confirmed)
        for number, group in self.windowed:
            first, end = sequence.num_freed[number], group.first_block(position, self.limits.block_size)
            if first < end:
                table, size = sequence.tables[number], self.limits.block_size
                num_prompt_blocks = sequence.num_prompt_tokens // size
                first_kept = min(end, max(first, self.limits.first_needed(group, num_prompt_blocks - 1)))
                end_kept = min(end, max(first_kept, num_prompt_blocks))
                self.pool.release(table[first:first_kept], is_behind=True)
                self.pool.release(table[first_kept:end_kept])  # another request may continue after the prompt
                self.pool.release(table[end_kept:end], is_behind=True)
                table[first:end] = [NO_BLOCK] * (end - first)
                sequence.num_freed[number] = end

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that a running sequence holds for drafts that are no longer in flight."""
        num_kept = num_blocks_kept(sequence, self.limits.block_size)
        for table in sequence.tables:
            self.pool.release(table[num_kept:])
            del table[num_kept:]

    def preempt(self, sequence: Sequence) -> None:
        """Move a sequence back to waiting; all of it is computed again."""
        self._stop_running(sequence)
        self._leave(sequence, SequenceState.LEAVING)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, for any reason."""
        if self.sequences.get(sequence.request.own.request_id) is sequence:
            del self.sequences[sequence.request.own.request_id]
            self._remember_hits(sequence)
            self.num_with_media -= sequence.media is not None
        if self.leaders.get(sequence.request.own.group_id) is sequence:
            del self.leaders[sequence.request.own.group_id]
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            sequence.state = SequenceState.FINISHED
            return
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
        self._leave(sequence, SequenceState.FINISHED)

    def _remember_hits(self, sequence: Sequence) -> None:
        """Remember the cache hits of an ended sequence: if a tokenizer dies with the result, the sequence is submitted
        again."""
        self._hits[sequence.request.own.request_id] = sequence.num_cached_tokens
        if len(self._hits) > MAX_REMEMBERED_HITS:
            del self._hits[next(iter(self._hits))]

    def hits_of_earlier_attempt(self, request: SequenceRequest) -> int:
        """Return how many prompt tokens an earlier attempt found in the prefix cache, which has contained its own prompt since
        then; -1: it was not admitted, or there was none."""
        num_cached_tokens = self._hits.pop(request.own.request_id, -1)
        return num_cached_tokens if request.own.attempt else -1

    def release_drained(self, sequence: Sequence) -> None:
        """Free the slot and blocks of a leaving sequence: no step in flight has it any more."""
        if sequence not in self._leaving:
            return
        self._leaving.remove(sequence)
        self._free_slots.append(sequence.slot)
        is_private = bool(sequence.request.shared.options.cache_salt)
        if sequence.state is SequenceState.FINISHED and sequence.is_started and not is_private:
            self.ended.append((sequence.slot, len(sequence.token_ids)))
        self._give_up_states(sequence)
        for table in sequence.forget_blocks():
            self.pool.release(table)
        if sequence.state is SequenceState.LEAVING:
            sequence.state = SequenceState.WAITING
            self._estimate(sequence)
            self.waiting.push(sequence)

    def share_blocks(self, sequence: Sequence) -> None:
        """Index the blocks that results have confirmed to be full and computed. Blocks that a step in flight still writes, or
        that were computed with other weights, are not indexed."""
        limits = self.limits
        num_full = sequence.num_confirmed // limits.block_size
        if (
            num_full <= sequence.num_indexed_blocks
            or not limits.has_prefix_cache
            or sequence.generation != self.pool.prefix_cache.generation
        ):
            return
        extras = sequence.extras
        hash_blocks(sequence.token_ids, limits.block_size, sequence.block_keys, num_full * limits.block_size, extras)
        stored: list[CachedBlock] = []
        for index in range(sequence.num_indexed_blocks, num_full):
            parent = sequence.block_keys[index - 1] if index else ROOT
            first, end = index * limits.block_size, (index + 1) * limits.block_size
            extra = () if extras is None else extras.of_block(sequence.token_ids, first, end)
            tokens = sequence.token_ids[first:end].tobytes()
            block_ids = [table[index] for table in sequence.tables]
            entry = CachedBlock(block_ids, sequence.block_keys[index], parent, tokens, extra)
            if self.pool.insert(entry):
                stored.append(entry)
        sequence.num_indexed_blocks = num_full
        if stored:
            self._on_stored(stored)

    def rollback_in_flight(self) -> None:
        """Restart running sequences from their confirmed positions: the steps in flight were lost with a rank."""
        for sequence in [*self.running, *self._leaving]:
            if sequence.states is not None and self.pool.states is not None:
                self.pool.states.rollback(sequence.states, to_start=sequence.is_pooled_whole)
            sequence.rollback_in_flight(self.limits.first_position)
        for sequence in list(self._leaving):
            self.release_drained(sequence)

    def can_keep_states(self, sequence: Sequence) -> bool:
        """Return whether others may continue from the sequence's states, as from its blocks."""
        return self.limits.has_prefix_cache and sequence.generation == self.pool.prefix_cache.generation

    def dispatch_states(self, sequence: Sequence, end: int) -> StateUse:
        """Return the states that a step reads and writes which computes the sequence up to `end`, at the least."""
        assert sequence.states is not None
        assert self.pool.states is not None
        ahead, num_prompt_tokens = sequence.num_ahead, sequence.num_prompt_tokens
        can_keep = self.can_keep_states(sequence)
        return self.pool.states.dispatch(sequence.states, end, ahead, num_prompt_tokens, can_keep=can_keep)

    def confirm_states(self, sequence: Sequence, end: int, num_accepted: int) -> None:
        """Note that a result has confirmed the sequence's state at `end`, without drafts, and accepted drafts after it; its
        full blocks are indexed."""
        if sequence.states is not None and self.pool.states is not None:
            can_keep = self.can_keep_states(sequence)
            num_prompt_tokens = sequence.num_prompt_tokens
            self.pool.states.confirm(
                sequence.states,
                end,
                sequence.block_keys,
                num_prompt_tokens,
                num_accepted=num_accepted,
                can_keep=can_keep,
            )

    def discard_states(self, sequence: Sequence) -> None:
        """Note that the sequence's oldest step in flight sampled nothing and is computed again."""
        if sequence.states is not None and self.pool.states is not None:
            self.pool.states.discard(sequence.states)

    def _give_up_states(self, sequence: Sequence) -> None:
        if sequence.states is not None and self.pool.states is not None:
            self.pool.states.leave(sequence.states)
            sequence.states = None

    def preempt_all(self) -> None:
        """Move all running sequences back to waiting."""
        for sequence in list(self.running):
            self.preempt(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.ended(sequence)

    def _leave(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        self._leaving.add(sequence)
        if not sequence.num_in_flight:
            self.release_drained(sequence)
