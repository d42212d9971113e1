"""Every sequence that the scheduler knows: who waits, who runs, and the slots and blocks that each holds.

Used by the scheduler process alone; the plans of `policy.py` and the results of steps are carried out here. A slot and the
blocks of a sequence that ended or was preempted are given back when the last step in flight that has a row of it is over: until
then a rank may still write to them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.block_keys import ROOT, hash_blocks
from engine.messages import SequenceRequest
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.policy import Admission, Limits, find_prefix, num_blocks_kept
from engine.scheduler.prefix_cache import CachedBlock
from engine.scheduler.queues import RunningQueue, WaitingQueue
from engine.scheduler.sequence import Sequence, SequenceState

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
        """`num_wanted_by_new requests`: drafts, until a worker says what pays."""
        self.num_wanted_by_new_requests = num_wanted_by_new_requests
        self.limits = limits
        self.pool = pool
        self.sequences: dict[str, Sequence] = {}
        self.running = RunningQueue()
        self.waiting = WaitingQueue()
        self.leaders: dict[str, Sequence] = {}
        self.num_with_media = 0  # of the sequences
        self._hits: dict[str, int] = {}  # cached tokens of those that ended last, by request id
        self._leaving: set[Sequence] = set()  # LEAVING or FINISHED, with steps in flight
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        # slots whose sequence is complete, and its tokens, since the last step; but those that nobody else may be told of
        self.ended: list[tuple[int, int]] = []
        self._on_stored = on_stored

    @property
    def num_leaving(self) -> int:
        """Samples that do not run any more but still hold a slot and blocks."""
        return len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Everything that waits: in order, held at the intake, or on its way back from a preemption."""
        return self.waiting.num_waiting + sum(sequence.state is SequenceState.LEAVING for sequence in self._leaving)

    def num_waiting_of(self, source: str) -> tuple[int, int]:
        """All that wait, and those of a source among them."""
        return self.num_waiting, self.waiting.num_of(source)

    def add(self, sequence: Sequence, is_new_request: bool = True) -> None:
        """A sequence from the intake; one that replaces an earlier attempt is no new request."""
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
        """Prompt tokens that wait to be computed, without those that are known to be cached."""
        return self.waiting.num_tokens_to_compute + sum(
            max(0, sequence.num_prompt_tokens - sequence.num_computed) for sequence in self.running
        )

    def _estimate(self, sequence: Sequence) -> None:
        """Estimate from the present cache how many tokens of a waiting sequence will have to be computed."""
        num_hits = len(find_prefix(sequence, self.pool, self.limits)) * self.limits.block_size
        sequence.num_tokens_to_compute = sequence.num_tokens - num_hits

    def admit(self, admissions: list[Admission]) -> None:
        """Give waiting sequences their slots and the blocks of all their tokens."""
        for admission in admissions:  # before anything is allocated, which might evict what was found
            self.pool.acquire(admission.block_ids)
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        sequence = admission.sequence
        self.waiting.remove(sequence)
        num_hit_tokens = len(admission.block_ids) * self.limits.block_size
        num_blocks = -(-sequence.num_tokens // self.limits.block_size)
        sequence.block_ids = admission.block_ids + self.pool.allocate(num_blocks - len(admission.block_ids))
        sequence.num_computed = sequence.num_confirmed = self.limits.first_position(num_hit_tokens)
        sequence.num_indexed_blocks = len(admission.block_ids)
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

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Make the block table hold `num_tokens` positions; the index of the first new block."""
        first = len(sequence.block_ids)
        num_new_blocks = -(-num_tokens // self.limits.block_size) - first
        if num_new_blocks > 0:
            sequence.block_ids += self.pool.allocate(num_new_blocks)
        return first

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks that a running sequence holds for drafts which are not under way."""
        num_kept = num_blocks_kept(sequence, self.limits.block_size)
        self.pool.release(sequence.block_ids[num_kept:])
        del sequence.block_ids[num_kept:]

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting, everything to be computed again."""
        self._stop_running(sequence)
        self._leave(sequence, SequenceState.LEAVING)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, for whatever reason."""
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
        """Remember the cache hits of a sequence that ended: if a tokenizer dies with the news, the sequence is submitted
        again."""
        self._hits[sequence.request.own.request_id] = sequence.num_cached_tokens
        if len(self._hits) > MAX_REMEMBERED_HITS:
            del self._hits[next(iter(self._hits))]

    def hits_of_earlier_attempt(self, request: SequenceRequest) -> int:
        """Return how many prompt tokens an earlier attempt found in the prefix cache, which holds its own prompt since; -1: it
        was not admitted, or there was none."""
        num_cached_tokens = self._hits.pop(request.own.request_id, -1)
        return num_cached_tokens if request.own.attempt else -1

    def release_drained(self, sequence: Sequence) -> None:
        """No step in flight has the sequence any more: what a leaving one holds is free."""
        if sequence not in self._leaving:
            return
        self._leaving.remove(sequence)
        self._free_slots.append(sequence.slot)
        is_private = bool(sequence.request.shared.options.cache_salt)
        if sequence.state is SequenceState.FINISHED and sequence.is_started and not is_private:
            self.ended.append((sequence.slot, len(sequence.token_ids)))
        self.pool.release(sequence.forget_blocks())
        if sequence.state is SequenceState.LEAVING:
            sequence.state = SequenceState.WAITING
            self._estimate(sequence)
            self.waiting.push(sequence)

    def share_blocks(self, sequence: Sequence) -> None:
        """Put the blocks into the prefix index that results have confirmed to be full and computed. Nothing that a step in
        flight still writes, and nothing that was computed with other weights, gets in."""
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
            entry = CachedBlock(sequence.block_ids[index], sequence.block_keys[index], parent, tokens, extra)
            if self.pool.insert(entry):
                stored.append(entry)
        sequence.num_indexed_blocks = num_full
        if stored:
            self._on_stored(stored)

    def rollback_in_flight(self) -> None:
        """The steps in flight are lost with a rank: running sequences start again from what results have confirmed."""
        for sequence in self.running:
            sequence.rollback_in_flight(self.limits.first_position)
        for sequence in list(self._leaving):
            sequence.rollback_in_flight(self.limits.first_position)
            self.release_drained(sequence)

    def preempt_all(self) -> None:
        """Everything that runs goes back to waiting."""
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
