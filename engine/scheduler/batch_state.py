"""Every sample that the scheduler knows: who waits, who runs, and the slots and blocks that each holds.

Used by the scheduler process alone; the plans of `policy.py` and the results of steps are carried out here. A slot and the
blocks of a sample that ended or was preempted are given back when the last step in flight that has a row of it is over: until
then a rank may still write to them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduler.block_pool import ROOT, BlockPool, CachedBlock, hash_blocks
from engine.scheduler.policy import Admission, Limits
from engine.scheduler.queues import SampleQueue, WaitingQueue
from engine.scheduler.sequence import Sample, SampleState


class Roster:
    """The samples by id, the two queues, free slots, the block pool and the leaders of groups."""

    def __init__(self, limits: Limits, pool: BlockPool, on_stored: Callable[[list[CachedBlock]], None]) -> None:
        self.limits = limits
        self.pool = pool
        self.samples: dict[str, Sample] = {}
        self.running = SampleQueue()
        self.waiting = WaitingQueue()
        self.leaders: dict[str, Sample] = {}
        self._leaving: set[Sample] = set()  # LEAVING or FINISHED, with steps in flight
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._on_stored = on_stored

    @property
    def num_leaving(self) -> int:
        """Samples that do not run any more but still hold a slot and blocks."""
        return len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Everything that waits: in order, held at the intake, or on its way back from a preemption."""
        return self.waiting.num_waiting + sum(sample.state is SampleState.LEAVING for sample in self._leaving)

    def add(self, sample: Sample, is_newcomer: bool = True) -> None:
        """A sample from the intake; one that replaces an earlier attempt is no newcomer."""
        assert sample.request.request_id not in self.samples
        self.samples[sample.request.request_id] = sample
        if is_newcomer:
            self.waiting.add_newcomer(sample)
        else:
            self.waiting.push(sample)

    def admit(self, admissions: list[Admission]) -> None:
        """Give waiting samples their slots and the blocks of all their tokens."""
        for admission in admissions:  # before anything is allocated, which might evict what was found
            self.pool.acquire(admission.block_ids)
        for admission in admissions:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        sample = admission.sample
        self.waiting.remove(sample)
        num_hit_tokens = len(admission.block_ids) * self.limits.block_size
        num_blocks = -(-sample.num_tokens // self.limits.block_size)
        sample.block_ids = admission.block_ids + self.pool.allocate(num_blocks - len(admission.block_ids))
        sample.num_computed = sample.num_confirmed = num_hit_tokens
        sample.num_indexed_blocks = len(admission.block_ids)
        sample.generation = self.pool.generation
        sample.slot = self._free_slots.pop()
        sample.state = SampleState.RUNNING
        self.running.push(sample)
        if sample.num_cached_tokens < 0:
            sample.num_cached_tokens = min(num_hit_tokens, sample.num_prompt_tokens)
        leader = self.leaders.get(sample.request.group_id)
        if sample.request.group_id and (leader is None or leader.state is not SampleState.RUNNING):
            self.leaders[sample.request.group_id] = sample

    def grow(self, sample: Sample, num_tokens: int) -> int:
        """Make the block table hold `num_tokens` positions; the index of the first new block."""
        first = len(sample.block_ids)
        num_new_blocks = -(-num_tokens // self.limits.block_size) - first
        if num_new_blocks > 0:
            sample.block_ids += self.pool.allocate(num_new_blocks)
        return first

    def preempt(self, sample: Sample) -> None:
        """Back to waiting, everything to be computed again."""
        self.running.remove(sample)
        self._leave(sample, SampleState.LEAVING)

    def finish(self, sample: Sample) -> None:
        """The sample has ended, for whatever reason: nobody knows it any more."""
        if self.samples.get(sample.request.request_id) is sample:
            del self.samples[sample.request.request_id]
        if self.leaders.get(sample.request.group_id) is sample:
            del self.leaders[sample.request.group_id]
        if sample.state is SampleState.WAITING:
            self.waiting.remove(sample)
            sample.state = SampleState.FINISHED
            return
        if sample.state is SampleState.RUNNING:
            self.running.remove(sample)
        self._leave(sample, SampleState.FINISHED)

    def landed(self, sample: Sample) -> None:
        """No step in flight has the sample any more: what a leaving one holds is free."""
        if sample not in self._leaving:
            return
        self._leaving.remove(sample)
        self._free_slots.append(sample.slot)
        self.pool.release(sample.forget_blocks())
        if sample.state is SampleState.LEAVING:
            sample.state = SampleState.WAITING
            self.waiting.push(sample)

    def share_blocks(self, sample: Sample) -> None:
        """Put the blocks into the prefix index that results have confirmed to be full and computed. Nothing that a step in
        flight still writes, and nothing that was computed with other weights, gets in."""
        limits = self.limits
        num_full = sample.num_confirmed // limits.block_size
        if num_full <= sample.num_indexed_blocks or not limits.has_prefix_cache or sample.generation != self.pool.generation:
            return
        hash_blocks(sample.token_ids, limits.block_size, sample.block_keys, num_full * limits.block_size)
        stored: list[CachedBlock] = []
        for index in range(sample.num_indexed_blocks, num_full):
            parent = sample.block_keys[index - 1] if index else ROOT
            tokens = sample.token_ids[index * limits.block_size : (index + 1) * limits.block_size].tobytes()
            entry = CachedBlock(sample.block_ids[index], sample.block_keys[index], parent, tokens)
            if self.pool.insert(entry):
                stored.append(entry)
        sample.num_indexed_blocks = num_full
        if stored:
            self._on_stored(stored)

    def forget_flight(self) -> None:
        """The steps in flight are lost with a rank: running samples start again from what results have confirmed."""
        for sample in self.running:
            sample.forget_flight()
        for sample in list(self._leaving):
            sample.forget_flight()
            self.landed(sample)

    def preempt_all(self) -> None:
        """Everything that runs goes back to waiting."""
        for sample in list(self.running):
            self.preempt(sample)

    def _leave(self, sample: Sample, state: SampleState) -> None:
        sample.state = state
        self._leaving.add(sample)
        if not sample.num_in_flight:
            self.landed(sample)
