"""All drafters of a rank behind one object: for each slot the most promising drafts, and as many of them as pay.

Owned by the runner, which reports each sequence that starts in a slot and each step, and asks for drafts once per step, after
sending its result. With several ranks the first one decides, because only it has the clock and the remembered answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.config import SpeculativeConfig
from engine.messages import SlotStart, Step, StepResult
from workers.engine.batch_slots import BatchSlots
from workers.engine.extension import Extension
from workers.engine.inputs import StepInputs
from workers.engine.rows import StepRows
from workers.engine.step_run import StepRun
from workers.extensions.drafts.device_mtp import DeviceMtpDrafter
from workers.extensions.drafts.draft_length_policy import Lengths
from workers.extensions.drafts.drafter import Drafter
from workers.extensions.drafts.mtp import MtpDrafter
from workers.extensions.drafts.ngram import NgramDrafter
from workers.extensions.drafts.suffix import SuffixDrafter
from workers.rank_group.collectives import Collectives, OneRank

_NONE = np.zeros(0, np.int32)
_RESTING_INTERVALS = 4, 16  # steps between searches for drafts that might pay again, growing
_LONGEST_REST = 64  # steps, if only slots on trial have drafts
METHODS: dict[str, Callable[[SpeculativeConfig, BatchSlots], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def make_drafting(
    config: SpeculativeConfig, slots: BatchSlots, layers: MtpDrafter | None = None, ranks: Collectives | None = None
) -> Drafting | None:
    """Return the drafting of the configured method, or None. `layers`: MTP layers of the checkpoint; `ranks`: None for a single
    rank."""
    methods = METHODS if layers is None else METHODS | {"mtp": lambda config, slots: layers}
    drafters = {method: methods[method](config, slots) for method in config.methods}
    if not drafters:
        return None
    ending = [layers] if layers and "mtp" in drafters and config.adaptive else []
    return Drafting(drafters, slots, ranks or OneRank(), ending, is_adaptive=config.adaptive)


def mtp_kind(inputs: StepInputs) -> type[MtpDrafter]:
    """Return the MTP drafter for how `inputs` are made."""
    return DeviceMtpDrafter if inputs.is_made_on_device else MtpDrafter


class Drafting(Extension):
    """Drafting with `drafters` by method, in the order in which they are asked: cheap ones first."""

    has_drafts = True

    def __init__(
        self,
        drafters: dict[str, Drafter],
        slots: BatchSlots,
        ranks: Collectives,
        ending: Sequence[MtpDrafter] = (),
        *,
        is_adaptive: bool,
    ) -> None:
        """`ending`: MTP layers that end their chains where further drafts do not pay."""
        leads = ranks.place == 0
        self.methods = tuple(drafters)
        self._drafters = [(drafter, leads or drafter.needs_hidden) for drafter in drafters.values()]
        self._slots = slots
        self._ranks = ranks
        self._ending = ending
        self._max_drafts = slots.drafts.shape[1]
        priors = [drafter.priors for drafter in drafters.values()]
        are_layers = [drafter.needs_hidden for drafter in drafters.values()]
        self._are_all_layers = all(are_layers)
        self._first_classes = np.cumsum([0, *map(len, priors)])[:-1].tolist()
        self._lengths = Lengths(slots, np.concatenate(priors), self._first_classes, are_layers, is_adaptive=is_adaptive)
        self._limits = np.full(slots.num_slots, self._max_drafts, np.int32)
        self._rows: StepRows | None = None  # of the last step
        self._counts = _NONE
        self._generation = 0  # of the prefix cache
        self._has_starts = self._has_drafts = False  # of the last step
        self._is_resting = False  # no slot wants drafts, nor would a new sequence
        self._num_skipped = 0  # steps since the last one that was examined
        self._interval = _RESTING_INTERVALS[0]

    @property
    def num_bytes(self) -> int:
        """Return the memory that all drafters use."""
        return sum(drafter.num_bytes for drafter, _ in self._drafters)

    @property
    def has_skipped(self) -> bool:
        """Whether the last step was skipped: nothing was drafted or learned after it."""
        return self._rows is None

    def on_start(self, start: SlotStart) -> None:
        token_ids = np.frombuffer(start.token_ids, np.int32)
        prediction = np.frombuffer(start.sampling.prediction_token_ids, np.int32)
        for drafter, is_used in self._drafters:
            if is_used:
                drafter.start(start.slot, token_ids, start.num_prompt_tokens, prediction)

    def on_step(self, step: Step) -> None:
        self._has_starts, self._has_drafts = len(step.starts) > 0, len(step.num_drafts) > 0
        if step.ended:
            self._stop(np.frombuffer(step.ended, np.int32).reshape(-1, 2))
        if step.generation != self._generation:
            self._generation = step.generation
            self.forget()

    def _stop(self, ended: np.ndarray) -> None:
        for slot, num_tokens in ended.tolist():
            token_ids = self._slots.token_ids[slot, :num_tokens]
            for drafter, is_used in self._drafters:
                if is_used and num_tokens <= self._slots.num_tokens[slot]:  # else this worker does not have it
                    drafter.stop(slot, token_ids)

    def choose_drafts(self, slots: np.ndarray, counts: np.ndarray, num_rows: int, num_sampled: int) -> np.ndarray:
        """Choose draft lengths by `Lengths.choose`. Every rank of a group calls this and then has the first rank's drafts."""
        if self._ranks.count == 1:
            own = self._lengths.choose(slots, counts, num_rows, num_sampled)
            for layers in self._ending:
                layers.expect(self._lengths.least_chance)
            return own
        chosen = np.zeros((len(slots), 1 + 2 * self._max_drafts), np.int32)
        if self._ranks.place == 0:
            chosen[:, 0] = self._lengths.choose(slots, counts, num_rows, num_sampled)
            chosen[:, 1:] = np.concatenate([self._slots.drafts[slots], self._slots.draft_classes[slots]], axis=1)
        chosen = self._ranks.broadcast(chosen)
        self._slots.drafts[slots], self._slots.draft_classes[slots] = np.split(chosen[:, 1:], 2, axis=1)
        self._lengths.mark_shared(slots)
        for layers in self._ending:
            layers.expect(self._lengths.least_chance)
            layers.ends[:] = self._ranks.broadcast(layers.ends)
        agreed: np.ndarray = chosen[:, 0].copy()
        return agreed

    def verified(self, rows: StepRows, counts: np.ndarray) -> tuple[bytes, int]:
        """Learn how many tokens each row of a step got (int32 [n]). Return how many drafts would pay in the next step (int32
        [n], as bytes; empty: none), and how many for a new sequence. While no row has or wants drafts, only one of several
        steps is examined, and counts for all of them."""
        if self._is_resting and not self._has_drafts and self._num_skipped + 1 < self._interval:
            self._num_skipped, self._rows = self._num_skipped + 1, None
            return b"", 0
        self._rows, self._counts = rows, counts
        self._lengths.learn(rows.slots, rows.num_drafts, counts if self._has_drafts else counts * (1 + self._num_skipped))
        wanted, by_new_requests = self._lengths.wanted(rows.slots), self._lengths.wanted_by_new_requests()
        is_wanted = bool(wanted.any())
        was_resting, self._is_resting = self._is_resting, not by_new_requests and not is_wanted
        first, last = _RESTING_INTERVALS
        self._interval = min(2 * self._interval, last) if was_resting and self._is_resting else first
        if self._is_resting and self._are_all_layers:  # other drafters may find drafts in any step
            self._interval = min(max(self._interval, self._lengths.num_idle(rows.slots)), _LONGEST_REST)
        return wanted.tobytes() if is_wanted else b"", by_new_requests

    def after_result(self, run: StepRun, result: StepResult) -> None:
        result.num_wanted, result.num_wanted_by_new_requests = self.verified(run.rows, run.counts)

    def after_send(self, run: StepRun) -> None:
        if self.has_skipped:
            return
        begin_ns = time.monotonic_ns()
        self.propose()
        run.draft_ns += time.monotonic_ns() - begin_ns
        if run.num_tokens:
            self.learn_time(run.num_tokens, run.step_ns + run.draft_ns)

    def propose(self) -> None:
        """Draft for the slots of the last step that sampled. A row with a late mask (`grammars/grammars.py`) got no token
        and is repeated; its hidden state is already that of its last token, so MTP layers have no draft tokens for it."""
        assert self._rows is not None, "no drafts after a skipped step"
        slots = self._rows.slots[self._rows.num_sampled > 0]
        self._lengths.clear(slots)
        for index, (drafter, is_used) in enumerate(self._drafters):
            if is_used:
                drafter.known(self._rows.slots, self._counts)
                self._lengths.offer(slots, drafter.propose(slots, self._limits), self._first_classes[index])

    def learn_time(self, num_rows: int, step_ns: int) -> None:
        """Learn the time of the last step, including drafting after it."""
        rows = self._rows
        assert rows is not None
        has_prompts = self._has_starts or int(rows.num_sampled.sum()) < num_rows
        has_drafts = self._has_drafts and bool(rows.num_drafts.any())
        num_steps, self._num_skipped = 1 + self._num_skipped, 0
        self._lengths.learn_time(num_rows, step_ns, has_prompts=has_prompts, has_drafts=has_drafts, num_steps=num_steps)

    def take_figures(self) -> list[tuple[str, int, int]]:
        """Return the verified and accepted drafts of each method since the last call; empty if there were none."""
        verified = self._lengths.take_verified()
        return [(method, *numbers) for method, numbers in zip(self.methods, verified, strict=True)] if verified else []

    def forget(self) -> None:
        """Forget ended sequences, after new weights or a cleared prefix cache."""
        for drafter, is_used in self._drafters:
            if is_used:
                drafter.forget()
