"""Answers that have a form: which tokens may come next in each slot, ready when the next token is drawn.

Owned by the runner. A sample with a grammar gets a `Constraint` when it takes a slot, made of the slot's tokens alone. All work
on it is a helper thread's: llguidance does it without the GIL while the rank computes the next step, and the rank waits for it
just before it draws. With drafts there is a mask for each position of the window:

    position      p        p + 1    p + 2       mask i is of position p + i, where d0 .. d(i - 1) stand before it
    tokens        ?        d0       d1          they are walked ahead during the step, and taken back

A mask that takes long delays its own sequence alone. The helper thread makes cheap masks first, by what the last one took, and
those of the source that has used least of it (`fair_thread.py`); a second thread makes those that take more than `SLOW_NS`. A
step waits for all masks together no longer than `FAST_NS`; a row with a late mask gets no token in this step. The scheduler
sends it again; the token is the same then, since it depends on the slot alone.

All of this is the same on all ranks of a group but for the clocks: which rows are late, and which answers and drafts end,
the first rank says.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.messages import SamplingParams, SlotStart
from workers.engine.rows import StepRows
from workers.engine.slots import Slots
from workers.extensions.grammars.fair_thread import FairThread
from workers.rank_group.communicator import Communicator

if TYPE_CHECKING:
    from engine.grammars.matcher import Matcher
    from engine.grammars.matching import Matching

_ALL = np.uint32(0xFFFFFFFF)
# A clock, where all else is bounded by counts: the library has none that bounds what is ambiguous (`s: s s | "Z"` takes 48 ms a
# token after 600). Whoever comes to it gets an error (`engine/scheduler/results.py`), never a shorter answer: when depends on
# the machine, what an answer says does not. Ordinary ones take up to 0.3 ms a token, the widest 0.7. It is of the thread's own
# processor time, so that waiting, as under load, is not in it. Drafts have as much to themselves, and none when it is spent.
BURST_NS = 200_000_000  # that a sample's masks may take at once
TOKEN_NS = 3_000_000  # and for each token besides: what is ambiguous takes more with each
SLOW_NS = 2_000_000  # of one mask: a constraint that took more has its work done apart from the others'
FAST_NS = 3_000_000  # that a step waits for the others
STEP_NS = 1_000_000  # that it waits for slow ones
ALONE_NS = 50_000_000  # that it waits where nothing else is drawn
_NICE = 5  # of the thread that compiles
_STACK_BYTES = 32 << 20  # more than where the tokenizer has compiled the same grammar


class Constraint:
    """One sample's. `masks`: uint32 [window, words], a bit for each token; the first is of the position `position`, which the
    answer's next token takes. Only one thread at a time."""

    def __init__(
        self, sampling: SamplingParams, num_prompt_tokens: int, token_ids: list[int], masks: np.ndarray, source: str = ""
    ) -> None:
        self.source = source
        assert sampling.grammar is not None
        self._grammar = sampling.grammar.text  # empty: thinking alone is bound
        self._marker: list[int] = np.frombuffer(sampling.grammar.end_of_thinking, np.int32).tolist()
        self._ends = set(sampling.stop_token_ids)
        self._ignores_ends = sampling.ignore_eos
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids = token_ids  # of the answer
        is_free = sampling.is_thinking or not self._grammar
        self._bound_at: int | None = None if is_free and self._marker else 0  # it binds behind so many of them
        self._begin = [] if sampling.is_thinking else np.frombuffer(sampling.grammar.begin_of_thinking, np.int32).tolist()
        self._max_thinking_tokens = sampling.grammar.max_thinking_tokens
        self._is_late = self._bound_at is None
        self._ended_at: int | None = None  # so many, an end token being the last
        self._matcher: Matcher | None = None
        self._end_ids: list[int] = []
        self.masks = masks
        self.last_ns = 0  # that its last mask took
        self.pending: Future[None] | None = None  # the last work on it
        self._own_ns = self._ahead_ns = 0  # that the answer took, and what drafts would be
        self.failed_at = -1  # no mask could be made for this position; -1: there is one for all
        self.error = ""

    @property
    def position(self) -> int:
        """Of the next token."""
        return self._num_prompt_tokens + len(self._token_ids)

    def prepare(self, matching: Matching) -> None:
        """What is not work on this sample's answer."""
        if self._grammar and self._matcher is None:
            matching.prepare(self._grammar)

    def make(self, matching: Matching) -> None:
        """From its tokens alone."""
        self._make_again(matching)
        self._fill(0)

    def take(self, matching: Matching, position: int, token_ids: list[int]) -> None:
        """The tokens from `position` on, which may be behind some that did not stand."""
        self._go_back(matching, self.position - position)
        if self.failed_at > position:  # in a window that came otherwise
            self.failed_at, self.error = -1, ""
        for token_id in token_ids:
            self._consume(token_id)
        self._fill(0)

    def spent(self, num_ns: int, *, is_ahead: bool) -> None:
        """So much processor time."""
        if is_ahead:
            self._ahead_ns += num_ns
        else:
            self._own_ns += num_ns
            self.last_ns = num_ns

    @property
    def is_slow(self) -> bool:
        return self.last_ns > SLOW_NS

    @property
    def is_ready(self) -> bool:
        """The work on it is done."""
        return self.pending is None or self.pending.done()

    @property
    def is_over(self) -> bool:
        """Who takes too much would hold up all that are drawn beside it."""
        return self._own_ns > self._limit_ns

    @property
    def may_look_ahead(self) -> bool:
        return self._ahead_ns <= self._limit_ns and not self.is_slow

    @property
    def _limit_ns(self) -> int:
        return BURST_NS + TOKEN_NS * len(self._token_ids)

    def end(self) -> None:
        """It is over: there is no mask for the next position."""
        if self.failed_at < 0:
            self._fail(f"after {len(self._token_ids)} tokens it has taken more than {self._limit_ns // 1_000_000} ms")
            self.masks[0] = _ALL

    def num_allowed(self, matching: Matching, drafts: list[int]) -> int:
        """How many of the drafts may stand, from the first on; none behind an end."""
        return self._walk(matching, drafts, is_filling=False)

    def look_ahead(self, matching: Matching, drafts: list[int]) -> None:
        """The masks of the positions behind the next one, should these stand."""
        self._walk(matching, drafts, is_filling=True)

    def _walk(self, matching: Matching, drafts: list[int], *, is_filling: bool) -> int:
        if self.failed_at >= 0:
            return 0
        num_before = len(self._token_ids)
        for draft in drafts:
            if self.failed_at >= 0 or self._ended_at is not None or not self._allows(draft):
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
        if self._bound_at is None or not self._grammar:
            return self._forced() in (None, token_id)
        assert self._matcher is not None
        if token_id in self._ends and self._matcher.is_accepting():
            return not self._ignores_ends or self._matcher.is_stopped()
        return self._matcher.num_valid([token_id]) > 0

    def _forced(self) -> int | None:
        """The next token of the end of thinking, where that took all the tokens that it may have."""
        if self._max_thinking_tokens < 0 or self._bound_at is not None:
            return None
        known, num_begin = self._token_ids, len(self._begin)
        num_over = len(known) - num_begin - self._max_thinking_tokens
        if num_over < 0 or known[:num_begin] != self._begin:
            return None
        sizes = range(min(num_over, len(self._marker) - 1), 0, -1)
        return self._marker[next((size for size in sizes if known[-size:] == self._marker[:size]), 0)]

    def _consume(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if self._ended_at is not None or self.failed_at >= 0:
            return
        if self._bound_at is None:
            if self._token_ids[-len(self._marker) :] == self._marker:
                self._bound_at = len(self._token_ids)
        elif token_id in self._ends:
            self._ended_at = len(self._token_ids)
        elif self._matcher is not None and not self._matcher.consume(token_id):
            self._fail(self._matcher.error())

    def _num_matched(self, num_tokens: int) -> int:
        """Of so many tokens, those that the matcher has."""
        if self._bound_at is None:
            return 0
        end = num_tokens if self._ended_at is None else min(num_tokens, self._ended_at - 1)
        return max(0, end - self._bound_at)

    def _go_back(self, matching: Matching, num_tokens: int) -> None:
        """By so many, to where a mask could be made. A matcher at a limit is of no use any more: another one is made."""
        if not num_tokens:
            return
        num_left = len(self._token_ids) - num_tokens
        num_matched = self._num_matched(len(self._token_ids)) - self._num_matched(num_left)
        del self._token_ids[num_left:]
        self.failed_at, self.error = -1, ""
        if self._matcher is not None and (self._matcher.is_error() or not self._matcher.rollback(num_matched)):
            self._make_again(matching)
            return
        if self._is_late and self._bound_at is not None and self._bound_at > num_left:
            self._bound_at = None
        if self._ended_at is not None and self._ended_at > num_left:
            self._ended_at = None

    def _make_again(self, matching: Matching) -> None:
        self._matcher = matching.matcher(self._grammar) if self._grammar else None
        self._end_ids = matching.tokens.end_ids
        known, self._token_ids = self._token_ids, []
        self._bound_at, self._ended_at = None if self._is_late else 0, None
        for token_id in known:
            self._consume(token_id)

    def _fill(self, place: int) -> None:
        """The mask of the next position, in this place of the window."""
        mask = self.masks[place]
        forced = self._forced()
        if forced is not None:
            mask[:] = 0
            _set(mask, {forced})
            return
        if self.failed_at >= 0 or self._bound_at is None or not self._grammar:
            mask[:] = _ALL
            return
        assert self._matcher is not None
        if self._ended_at is not None or (self._matcher.is_stopped() and not self._matcher.is_error()):
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


class ConstraintMetrics(msgspec.Struct):
    """Of some steps."""

    num_tokens: int = 0  # that were drawn with a constraint
    num_failed: int = 0  # samples that came to a limit
    wait_ns: int = 0  # for the helper thread


def _thread(name: str, begin: Callable[[], object] = lambda: None) -> ThreadPoolExecutor:
    """One that is there, with the stack that grammars need."""
    before = threading.stack_size(_STACK_BYTES)
    made = ThreadPoolExecutor(1, name)
    made.submit(begin)
    threading.stack_size(before)
    return made


class Constraints:
    """Of all slots: `slots.constraints`. Nothing is made before the first grammar comes."""

    def __init__(
        self,
        slots: Slots,
        vocab_size: int,
        max_drafts: int,
        make_matching: Callable[[], Matching],
        communicator: Communicator | None = None,
    ) -> None:
        """`communicator`: of a group of ranks, which all call the same in the same order."""
        self._slots = slots
        self._communicator = communicator
        self._mask_shape = 1 + max_drafts, -(-vocab_size // 32)
        self._make_matching = make_matching
        self._matching: Matching | None = None
        self._making = threading.Lock()
        self._threads: dict[bool, FairThread] = {}  # by whether they are for slow constraints
        self._late: set[int] = set()  # rows of the step that is drawn now
        self._compiler: ThreadPoolExecutor | None = None
        self._compiled: deque[int] = deque()  # numbers that nobody has taken yet
        self.num_compiling = 0
        self.is_used = False
        self._figures = ConstraintMetrics()

    def take_figures(self) -> ConstraintMetrics:
        """What happened since the last call."""
        figures, self._figures = self._figures, ConstraintMetrics()
        return figures

    def compile(self, number: int, grammar: str) -> None:
        """Have it ready before its sequence comes, in a thread that leaves the rest of the machine to the step."""
        if self._compiler is None:
            self._compiler = _thread("grammars", lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE))
        self.num_compiling += 1
        self._compiler.submit(self._compile, number, grammar)

    def take_compiled(self) -> list[int]:
        """The numbers of those that were compiled since the last call."""
        found = []
        while self._compiled:
            found.append(self._compiled.popleft())
        self.num_compiling -= len(found)
        return found

    def _compile(self, number: int, grammar: str) -> None:
        try:
            self._ready().prepare(grammar)
        finally:  # what is wrong with it, its samples say
            self._compiled.append(number)

    def start(self, message: SlotStart) -> None:
        """A sequence took the slot, which is reset."""
        if message.sampling.grammar is None:
            return
        self.is_used = True
        masks = np.zeros(self._mask_shape, np.uint32)
        answer = np.frombuffer(message.token_ids, np.int32)[message.num_prompt_tokens :].tolist()
        constraint = Constraint(message.sampling, message.num_prompt_tokens, answer, masks, message.source)
        self._slots.constraints[message.slot] = constraint
        self._slots.sampling["masks"][message.slot] = masks.ctypes.data
        self._submit([constraint], lambda matching, index: constraint.make(matching))

    def cut(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """How many of the first counts[i] drafts of slots[i] may stand, int32 [n]: the others are not verified."""
        counts = counts.copy()
        own = [index for index in np.flatnonzero(counts) if self._slots.constraints[slots[index]] is not None]
        if not own:
            return counts
        constraints = [self._slots.constraints[slot] for slot in slots[own]]
        begin_ns = time.monotonic_ns()
        wait([each.pending for each in constraints if each.pending and not each.is_slow], FAST_NS / 1e9)
        self._figures.wait_ns += time.monotonic_ns() - begin_ns
        may_look_ahead = self._agreed([constraint.is_ready and constraint.may_look_ahead for constraint in constraints])
        self._wait([constraint for constraint, may in zip(constraints, may_look_ahead, strict=True) if may])
        for index, constraint, may in zip(own, constraints, may_look_ahead, strict=True):
            slot = slots[index]
            if not may:
                counts[index] = 0
            elif not self._is_layers(slot) and constraint.position == self._slots.num_tokens[slot]:
                begin_ns = time.thread_time_ns()
                counts[index] = constraint.num_allowed(self._ready(), self._slots.drafts[slot, : counts[index]].tolist())
                constraint.spent(time.thread_time_ns() - begin_ns, is_ahead=True)
        return counts

    def look_ahead(self, rows: StepRows) -> None:
        """The drafts of a step are behind the slots' tokens; the step is about to be computed."""
        own, windows = [], []
        for row in np.flatnonzero(rows.num_drafts).tolist():
            slot, end = rows.slots[row], rows.ends[row]
            if self._slots.constraints[slot] is not None:
                own.append(self._slots.constraints[slot])
                windows.append(self._slots.token_ids[slot, end - rows.num_drafts[row] : end].tolist())
        if own:
            self._submit(own, lambda matching, index: own[index].look_ahead(matching, windows[index]), is_ahead=True)

    def ready(self, rows: StepRows) -> None:
        """The masks of all that a step draws; to be called before it does."""
        self._late = set()
        own = self._of(rows)
        if not own:
            return
        self._wait_in_time(own, int(np.count_nonzero(rows.num_sampled)))
        are_late = [not constraint.is_ready for _, constraint, _ in own]
        agreed = self._agreed([*are_late, *(constraint.is_over for _, constraint, _ in own)])
        self._wait([constraint for (_, constraint, _), is_late in zip(own, agreed, strict=False) if not is_late])
        for (row, constraint, first), is_late, is_over in zip(own, agreed[: len(own)], agreed[len(own) :], strict=True):
            if is_late:
                self._late.add(row)
                self._slots.is_late[rows.slots[row]] = True
                self._slots.sampling["num_masks"][rows.slots[row]] = 0
                continue
            slot = rows.slots[row]
            if constraint.position != first:  # a step that is run again
                begin = min(first, constraint.position)
                constraint.take(self._ready(), begin, self._slots.token_ids[slot, begin:first].tolist())
            if is_over:
                constraint.end()
            self._slots.sampling["first_masked"][slot] = first
            self._slots.sampling["num_masks"][slot] = rows.num_sampled[row]

    @property
    def late_rows(self) -> list[int]:
        """Rows of the step whose masks were not ready: what is drawn for them does not count."""
        return sorted(self._late)

    def drawn(self, rows: StepRows, counts: np.ndarray) -> dict[int, str]:
        """The slots have the tokens that a step drew, counts[i] (int32 [n]) of row i. Rows that came to a limit, and which."""
        failed, own, drawn = {}, [], []
        for row, constraint, first in self._of(rows):
            if row in self._late:
                continue
            end = first + int(counts[row])
            if first <= constraint.failed_at < end:
                failed[row] = constraint.error
            own.append(constraint)
            drawn.append((first, self._slots.token_ids[rows.slots[row], first:end].tolist()))
            self._figures.num_tokens += end - first
        if own:
            self._submit(own, lambda matching, index: own[index].take(matching, *drawn[index]))
            self._figures.num_failed += len(failed)
        return failed

    def _of(self, rows: StepRows) -> list[tuple[int, Constraint, int]]:
        """Of the rows that draw and have one: the row, the constraint, the position of the first token that is drawn."""
        constraints = self._slots.constraints[rows.slots]
        firsts = rows.ends - rows.num_sampled + 1
        own = [row for row in np.flatnonzero(rows.num_sampled).tolist() if constraints[row] is not None]
        return [(row, constraints[row], int(firsts[row])) for row in own]

    def _agreed(self, flags: list[bool]) -> list[bool]:
        """Of several ranks the first one's."""
        return flags if self._communicator is None else self._communicator.broadcast(np.array(flags)).tolist()

    def _is_layers(self, slot: int) -> bool:
        """Whether its drafts are made later, by layers, when the step begins."""
        return bool(self._slots.is_drafted_by_layers[slot])

    # ------------------------------------------------------------------------------------------------- the helper thread

    def _submit(self, constraints: list[Constraint], work: Callable[[Matching, int], None], *, is_ahead: bool = False) -> None:
        """Do `work` on each, by its index, behind all that its source submitted."""
        for place in sorted(range(len(constraints)), key=lambda place: constraints[place].last_ns):
            constraint = constraints[place]
            thread = self._threads.get(constraint.is_slow)
            if thread is None:
                thread = FairThread(_thread("slow constraints" if constraint.is_slow else "constraints"))
                self._threads[constraint.is_slow] = thread
            constraint.pending = thread.submit(constraint.source, partial(self._do, constraint, place, work, is_ahead))

    def _do(self, constraint: Constraint, index: int, work: Callable[[Matching, int], None], is_ahead: bool) -> None:
        matching = self._ready()
        constraint.prepare(matching)
        begin_ns = time.thread_time_ns()
        work(matching, index)
        constraint.spent(time.thread_time_ns() - begin_ns, is_ahead=is_ahead)

    def _ready(self) -> Matching:
        with self._making:
            if self._matching is None:
                self._matching = self._make_matching()
            return self._matching

    def _wait(self, constraints: list[Constraint]) -> None:
        """Until all work on these is done."""
        begin_ns = time.monotonic_ns()
        for pending in {id(each.pending): each.pending for each in constraints if each.pending is not None}.values():
            pending.result()
        self._figures.wait_ns += time.monotonic_ns() - begin_ns

    def _wait_in_time(self, own: list[tuple[int, Constraint, int]], num_drawn: int) -> None:
        """As long as a step may; longer only where none of the `num_drawn` rows could be drawn."""
        begin_ns = time.monotonic_ns()
        constraints = [constraint for _, constraint, _ in own]
        for is_slow, time_ns in ((False, FAST_NS), (True, STEP_NS)):
            wait([each.pending for each in constraints if each.pending and each.is_slow == is_slow], time_ns / 1e9)
        pending = [each.pending for each in constraints if each.pending and not each.is_ready]
        if len(pending) == num_drawn:
            wait(pending, ALONE_NS / 1e9, FIRST_COMPLETED)
        self._figures.wait_ns += time.monotonic_ns() - begin_ns
