"""Recurrent states of sequences: the slots of the state arena that they hold, and states that are kept for later requests.

Part of `block_pool.py`, in the scheduler process, for models with recurrent layers (`engine/checkpoint/state_spec.py`). Pure.

A state is what recurrent layers know of a sequence's first tokens. A step reads one slot and writes another, never in place: a
step that is lost with a worker is sent again, and step n + 1 is sent before the result of step n is back. So a sequence holds
one slot, and one more for each step in flight:

    dispatch n          reads a, writes b
    dispatch n + 1      reads b, writes c
    result n            b is confirmed, a is given back
    a rank dies         c is given back; the next step reads b again

Slot 0 is the state before position 0: it is read, but never written or held. Drafts are not in the written state. Their rows
are logged behind it, and the next step replays those that were accepted. With `num_overlap`, the last certain row is logged,
too, since a sequence then continues one position early.

States at block boundaries are kept under the keys of their blocks: some of a prompt, and the last of an answer. Of a prompt
these are one every so many tokens, the last one, and the one at its branch, where it leaves what was computed before: a third
prompt may begin like these two. A boundary in the middle of a step needs a slot of its own. A kept state without a sequence is
evicted when no slot is vacant: the one that is worth least by its uses and by the time to compute it again from the kept state
before it (GreedyDual, Cao and Irani 1997; all states have the same size). It also goes when its block leaves the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import msgspec

from engine.config import STATES_PER_SEQUENCE

NO_STATE = 0
_MIN_RANKS = 64  # that are looked through only when one is evicted


class StateRules(msgspec.Struct, frozen=True):
    """Which states are kept. A boundary b is a multiple of `block_size`; its state has b - num_overlap tokens. `branch`: of a
    prompt; 0: it has none."""

    block_size: int
    interval: int  # tokens between kept states of a prompt, a multiple of the block size; 0: no state is kept
    num_overlap: int = 0

    def last_of_prompt(self, num_prompt_tokens: int) -> int:
        """Return the last boundary from which the same prompt can continue."""
        return max(0, num_prompt_tokens - 1) // self.block_size * self.block_size

    def is_wanted(self, boundary: int, num_prompt_tokens: int, branch: int = 0) -> bool:
        """Return whether the state at a position is kept if it is there anyway."""
        if not self.interval or not boundary or boundary % self.block_size:
            return False
        return boundary % self.interval == 0 or boundary == branch or boundary >= self.last_of_prompt(num_prompt_tokens)

    def last_wanted(self, start: int, end: int, num_prompt_tokens: int, branch: int = 0) -> int:
        """Return the last boundary in (start, end] with a state worth keeping; 0: there is none."""
        if not self.interval:
            return 0
        last = end // self.block_size * self.block_size
        if last < self.last_of_prompt(num_prompt_tokens):
            last = max(end // self.interval * self.interval, branch if branch <= end else 0)
        return last if last > start else 0

    def cut(self, start: int, end: int, num_prompt_tokens: int, branch: int = 0) -> int:
        """Return where a chunk [start, end) of a prompt ends: a step keeps one state within the chunk, and the one at its end.
        A chunk is only cut if it is longer than the interval, or has a branch."""
        if not self.interval or (end - start <= self.interval and not start < branch < end):
            return end
        last, first = self.last_of_prompt(num_prompt_tokens), start // self.interval * self.interval + self.interval
        found = sorted({first, first + self.interval, branch, last})
        inside = [each for each in found if start < each < end and each <= last]
        return inside[1] if len(inside) > 1 else end


class StateUse(msgspec.Struct):
    """Slots of one sequence in one step. With drafts in flight, positions are the lowest possible; results raise them."""

    read: int
    position: int  # tokens in the state that is read
    write: int
    end: int  # tokens in the state that is written
    keep: int = NO_STATE  # gets the state at `keep_at`, if the step reaches it
    keep_at: int = 0


class SequenceStates(msgspec.Struct):
    """Slots that a sequence holds."""

    slot: int = NO_STATE  # confirmed by results
    position: int = 0  # tokens in it
    flight: list[StateUse] = msgspec.field(default_factory=list)  # of the steps in flight, oldest first
    branch: int = 0  # of its prompt
    answer_key: bytes = b""  # under which its last state of the answer is kept; empty: none


class KeptState(msgspec.Struct, eq=False):
    """A state of the index."""

    key: bytes  # of the block before its boundary
    slot: int
    position: int
    before: KeptState | None  # the kept state before it in its chain, when it was kept
    since: float = 0.0  # value of the states evicted before it was last used
    num_uses: int = 0
    turn: int = 0  # of its last use
    is_gone: bool = False


_Rank = tuple[float, int, KeptState]  # value, turn


class StatePool:
    """All slots. `num_states` are numbered from 1; `num_running` sequences run at a time. `cost`: nanoseconds that some tokens
    from a position on take."""

    def __init__(
        self,
        num_states: int,
        num_running: int,
        rules: StateRules,
        cost: Callable[[int, int], float] = lambda start, count: count,
    ) -> None:
        num_needed = STATES_PER_SEQUENCE * num_running
        assert num_states >= num_needed, f"{num_states} states for {num_running} sequences"
        self.rules = rules
        self.num_states = num_states
        self.num_used = 0  # slots that sequences hold
        self.num_hits = 0  # sequences that began with a kept state, since the caller last took the number
        self.num_evictions = 0  # the same for evicted states
        self.changed: dict[bytes, bool] = {}  # keys of the index since the caller last took them: whether there is a state
        self._cost = cost
        self._vacant = list(range(num_states, 0, -1))
        self._num_references = [0] * (num_states + 1)
        self._kept: dict[bytes, KeptState] = {}
        self._ranks: list[_Rank] = []  # heap: each kept state as it was when pushed, and some that are gone
        self._turn = 0
        self._kept_in: dict[int, KeptState] = {}  # by slot
        self._num_spare = num_states - num_needed
        self._evicted_value = 0.0

    # ------------------------------------------------------------------------------------------------------------- index

    @property
    def num_kept(self) -> int:
        """States in the index."""
        return len(self._kept)

    @property
    def num_free(self) -> int:
        """Slots that no sequence holds: vacant ones and those of kept states."""
        return len(self._vacant) + sum(not self._num_references[slot] for slot in self._kept_in)

    @property
    def kept_keys(self) -> list[bytes]:
        return list(self._kept)

    def longest(self, keys: Sequence[bytes], num_blocks: int) -> int:
        """Return how many of the first `num_blocks` blocks a sequence can continue after: there is a state; 0: none."""
        while num_blocks and keys[num_blocks - 1] not in self._kept:
            num_blocks -= 1
        return num_blocks

    def drop(self, key: bytes) -> None:
        """Remove the state under a key, if there is one: its block is gone."""
        entry = self._kept.pop(key, None)
        if entry is not None:
            del self._kept_in[entry.slot]
            entry.is_gone = True
            self.changed[key] = False
            if not self._num_references[entry.slot]:
                self._vacant.append(entry.slot)

    def clear(self) -> None:
        """Empty the index; states of sequences stay."""
        for key in self.kept_keys:
            self.drop(key)
        self.changed.clear()

    # --------------------------------------------------------------------------------------------------------- sequences

    def start(self, key: bytes = b"", branch: int = 0) -> SequenceStates:
        """Return the states of a sequence that continues after the block with this key; empty: that begins."""
        if not key:
            return SequenceStates(branch=branch)
        entry = self._kept[key]
        entry.num_uses += 1
        self._use(entry)
        self.num_hits += 1
        self.num_used += not self._num_references[entry.slot]
        self._num_references[entry.slot] += 1
        return SequenceStates(entry.slot, entry.position, branch=branch)

    def dispatch(
        self, states: SequenceStates, end: int, num_ahead: int, num_prompt_tokens: int, *, can_keep: bool = False
    ) -> StateUse:
        """Return the slots of the sequence's next step, which computes it up to `end`, or up to `num_ahead` more positions."""
        overlap = self.rules.num_overlap
        read, position = states.slot, states.position
        if states.flight:
            read, position = states.flight[-1].write, states.flight[-1].end
        written = max(0, end - overlap)
        keep = boundary = 0
        if can_keep:
            last = end + num_ahead if num_ahead else end - 1  # what is written may be kept itself
            boundary = self.rules.last_wanted(position + overlap, last, num_prompt_tokens, states.branch)
        if boundary and self._num_spare:
            self._num_spare -= 1
            keep = self._allocate()
        use = StateUse(read, position, self._allocate(), written, keep, boundary - overlap if keep else 0)
        states.flight.append(use)
        return use

    def confirm(
        self,
        states: SequenceStates,
        end: int,
        keys: Sequence[bytes],
        num_prompt_tokens: int,
        *,
        num_accepted: int = 0,
        can_keep: bool = False,
    ) -> None:
        """Note the result of the sequence's oldest step: it is computed up to `end`, without drafts, and `num_accepted` of
        these follow. `keys`: of its blocks."""
        use, begin, overlap = states.flight.pop(0), states.position, self.rules.num_overlap
        for later in states.flight:
            later.end += num_accepted
        self._release(states.slot)
        states.slot, states.position = use.write, max(0, end - overlap)
        if use.keep:
            if can_keep and begin < use.keep_at <= states.position:
                self._keep(states, use.keep, use.keep_at + overlap, keys, num_prompt_tokens)
            self._give_up_keep(use)
        if can_keep and self.rules.is_wanted(states.position + overlap, num_prompt_tokens, states.branch):
            self._keep(states, states.slot, states.position + overlap, keys, num_prompt_tokens)

    def discard(self, states: SequenceStates) -> None:
        """Note that the sequence's oldest step is to be computed again."""
        use = states.flight.pop(0)
        self._release(use.write)
        if use.keep:
            self._give_up_keep(use)

    def rollback(self, states: SequenceStates, *, to_start: bool = False) -> None:
        """Note that the steps in flight are lost. `to_start`: the sequence begins again."""
        while states.flight:
            self.discard(states)
        if to_start:
            self._release(states.slot)
            states.slot, states.position = NO_STATE, 0

    def leave(self, states: SequenceStates) -> None:
        """Give back all slots of a sequence."""
        self.rollback(states, to_start=True)

    # ------------------------------------------------------------------------------------------------------------- slots

    def _keep(self, states: SequenceStates, slot: int, boundary: int, keys: Sequence[bytes], num_prompt_tokens: int) -> None:
        """Put a state into the index. Of an answer only the last one stays there, unless another sequence has used it."""
        num_blocks = boundary // self.rules.block_size
        key, former = keys[num_blocks - 1], self._kept.get(states.answer_key)
        is_new = key not in self._kept
        if boundary > self.rules.last_of_prompt(num_prompt_tokens) and key != states.answer_key:
            states.answer_key = key if is_new else b""
            if former is not None and not former.num_uses:
                self.drop(former.key)
        if is_new:
            before = self.longest(keys, num_blocks - 1)
            entry = KeptState(key, slot, boundary - self.rules.num_overlap, self._kept[keys[before - 1]] if before else None)
            self._kept[key] = self._kept_in[slot] = entry
            self._use(entry)
            self._push(entry)
            self.changed[key] = True

    def _give_up_keep(self, use: StateUse) -> None:
        self._num_spare += 1
        self._release(use.keep)

    def _allocate(self) -> int:
        """Return a slot with one reference. There is one, since sequences have at most their share."""
        if not self._vacant:
            self._evict()
        slot = self._vacant.pop()
        self._num_references[slot] = 1
        self.num_used += 1
        return slot

    def _release(self, slot: int) -> None:
        if not slot:
            return
        self._num_references[slot] -= 1
        assert self._num_references[slot] >= 0, f"state {slot} released twice"
        if not self._num_references[slot]:
            self.num_used -= 1
            if slot not in self._kept_in:
                self._vacant.append(slot)

    def _use(self, entry: KeptState) -> None:
        self._turn += 1
        entry.turn, entry.since = self._turn, self._evicted_value

    def _push(self, entry: KeptState) -> None:
        if len(self._ranks) >= _MIN_RANKS + 2 * len(self._kept):
            self._ranks = [rank for rank in self._ranks if not rank[-1].is_gone]
            heapify(self._ranks)
        heappush(self._ranks, self._rank(entry))

    def _evict(self) -> None:
        """Remove the kept state that is worth least; the least recently used of several. Values grow with use, so those in the
        heap are too low, if anything."""
        held: list[_Rank] = []
        while True:
            rank = heappop(self._ranks)
            entry = rank[-1]
            if entry.is_gone:
                continue
            if self._num_references[entry.slot]:
                held.append(rank)
                continue
            value, *_ = now = self._rank(entry)
            if now <= rank:
                break
            heappush(self._ranks, now)
        for rank in held:
            heappush(self._ranks, rank)
        self._evicted_value = max(self._evicted_value, value)
        self.num_evictions += 1
        self.drop(entry.key)

    def _rank(self, entry: KeptState) -> _Rank:
        return self._value(entry), entry.turn, entry

    def _value(self, entry: KeptState) -> float:
        """Return the value of a state: the time that its uses saved, above that of the states that were evicted before."""
        while entry.before is not None and entry.before.is_gone:
            entry.before = entry.before.before
        begin = 0 if entry.before is None else entry.before.position
        return entry.since + (1 + entry.num_uses) * self._cost(begin, entry.position - begin)
