"""From a step's hidden states to its result: which rows' logits are wanted, on their way to the host, drawn from and scored.

Owned by the runner's core. `begin` enqueues what comes first, `end` waits for it: a device works meanwhile. Of several ranks
each draws for some of the rows.

What a device draws by itself (`Drawing` in ops/table.py) comes to the host in one small copy, and no logits with it. Which rows
these are depends on their requests alone; but where the device draws without temperature alone, which gives the same tokens
wherever it is done, either all rows of a step or none. With all drawn there, and nobody who drafts, tokens are written where
the next step finds them, which may begin before they are known here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from engine.messages import PromptLogprobs, Step, StepResult
from workers.devices.device import Device
from workers.devices.enqueued import Fetch
from workers.engine.inputs import StepInputs
from workers.engine.plan import Plan
from workers.engine.rows import SampledTokens, StepRows
from workers.engine.slots import Slots
from workers.extensions.drafts.drafting import Drafting
from workers.extensions.grammars.constraints import Constraints
from workers.rank_group.communicator import Communicator
from workers.sampling import sampler
from workers.sampling.rank_sampling import exchanged
from workers.sampling.sampler import Scores


class StepRun(msgspec.Struct):
    """A step that was begun."""

    step: Step
    rows: StepRows
    plan: Plan
    prompt_rows: dict[int, int]  # rows whose prompt log-probabilities are wanted -> how many of their positions give one
    kept_ends: np.ndarray  # int [n]: of each row, among the rows that are kept
    is_drafting: np.ndarray | None  # bool [n]: by layers, where there are such
    encoded: list[bytes]  # units of media that are complete with it
    wanted: SampledTokens
    kept_rows: np.ndarray  # of `wanted`
    drawn: np.ndarray  # bool [m], of `wanted`: by the device
    has_draft_tokens: bool = False  # among the tokens that its rows read, which the device alone knows
    sampled_on_device: bool = False  # what the next step reads of it is where that reads it
    num_starts: np.ndarray | None = None  # of the slots of `wanted`, where it is
    num_tokens: int = 0
    fetches: list[tuple[slice, Fetch]] = []  # of what was drawn, some of `wanted` each
    first: Fetch | None = None  # logits of the first of these
    run_ns: int = 0
    sample_ns: int = 0

    @staticmethod
    def of(
        step: Step,
        rows: StepRows,
        plan: Plan,
        prompt_rows: dict[int, int],
        kept_ends: np.ndarray,
        is_drafting: np.ndarray | None,
        encoded: list[bytes],
    ) -> StepRun:
        wanted = SampledTokens.of(rows)
        kept_rows = (kept_ends - rows.num_sampled)[wanted.rows] + wanted.places
        drawn = np.zeros(len(kept_rows), np.bool_)
        return StepRun(step, rows, plan, prompt_rows, kept_ends, is_drafting, encoded, wanted, kept_rows, drawn)


class StepSampling:
    """Draws and scores on the host, with the native sampler, what the device does not draw."""

    def __init__(
        self,
        rank: int,
        device: Device,
        inputs: StepInputs,
        slots: Slots,
        communicator: Communicator | None,
        drafting: Drafting | None,
        constraints: Constraints,
    ) -> None:
        self._rank, self._device, self._inputs, self._slots = rank, device, inputs, slots
        self._communicator, self._drafting, self._constraints = communicator, drafting, constraints
        self._drawing = device.ops.drawing if inputs.in_place is not None else None
        self._num_begun = 0

    def prompt_rows(self, rows: StepRows) -> dict[int, int]:
        """Rows whose prompt log-probabilities are wanted -> how many of their positions (the first ones) give one: position p
        gives that of token p + 1, so the prompt's last gives none."""
        result = {}
        for row in np.flatnonzero(self._slots.wants_prompt_logprobs[rows.slots]).tolist():
            last = int(self._slots.num_prompt_tokens[rows.slots[row]]) - 1
            count = min(int(rows.ends[row]), last) - int(rows.starts[row])
            if count > 0:
                result[row] = count
        return result

    def kept_counts(self, rows: StepRows, prompt_rows: Iterable[int]) -> np.ndarray:
        """How many positions of each row, the last ones, have logits that are wanted."""
        counts: np.ndarray = rows.num_sampled.copy()
        for row in prompt_rows:
            counts[row] = rows.counts[row]
        return counts

    def flags(self, run: StepRun) -> np.ndarray | None:
        """For `DeviceInputs.set_rows`, once it is known which of its tokens the device draws."""
        if self._drawing is None:
            return None
        from ops.paddle.metadata import DRAWN  # with Paddle's table, as the device has imported

        slots = run.wanted.slots
        run.drawn = self._slots.is_plain[slots]
        if self._drawing.is_greedy:
            of_slots = self._slots.sampling[slots]
            is_greedy = run.drawn & (of_slots["temperature"] <= 0) & (of_slots["num_logprobs"] < 0)
            run.drawn = np.full(len(slots), is_greedy.all())
        run.sampled_on_device = bool(run.drawn.all()) and not run.prompt_rows and self._drafting is None
        flags: np.ndarray = DRAWN * ((run.rows.num_sampled == 1) & run.sampled_on_device)
        return flags

    def begin(self, run: StepRun) -> None:
        """Have the first logits made, and sent to the host; what the device draws is all drawn."""
        if run.drawn.any() or run.has_draft_tokens:
            self._num_begun += 1
            for part in self._parts(run.kept_rows):
                self._inputs.set_logit_rows(run.kept_rows[part])
                logits = run.plan.logits()
                key = f"drawn.{self._num_begun % 2}.{part.start}"  # that of the step before is under way
                run.fetches.append((part, self._device.fetch(key, run.plan.drawn(logits))))
                if part.start == 0 and not run.drawn.all():
                    run.first = self._device.fetch("logits", logits)
        elif len(run.kept_rows):
            run.first = self._enqueue(run.plan, run.kept_rows[: self._inputs.max_logit_rows])
        if run.sampled_on_device:
            run.num_starts = self._slots.num_starts[run.wanted.slots]
            self._slots.begin(run.wanted.slots, run.wanted.positions)

    def end(self, run: StepRun) -> StepResult:
        """The step's tokens, which are the slots' then."""
        step, rows, wanted = run.step, run.rows, run.wanted
        if self._constraints.is_used:
            self._constraints.ready(rows)
        num_tops = self._slots.sampling["num_logprobs"][wanted.slots]
        found = Scores.of(np.empty(len(wanted.slots), np.int32), max(0, int(num_tops.max(initial=0))))
        chosen: dict[int, tuple[bytes, bytes]] = {}  # by place in `wanted`: tokens that were asked for
        self._take_drawn(run, found)
        for part, logits in () if run.drawn.all() else self._logits(run, run.kept_rows, run.first):
            own = np.flatnonzero(~run.drawn[part])
            of_host, rest = own + part.start, logits if len(own) == len(logits) else logits[own]
            drawn = self.draw(rest, wanted.slots[of_host], wanted.positions[of_host])
            found.put(of_host, drawn)
            chosen |= {int(of_host[row]): named for row, named in self._chosen(rest, wanted.slots[of_host], drawn)}
        stands, counts = wanted.accepted(rows, found.token_ids, self._slots.token_ids)
        if self._constraints.is_used and self._constraints.late_rows:
            late = self._constraints.late_rows
            stands, counts = stands & ~np.isin(wanted.rows, late), counts.copy()
            counts[late] = 0
        if run.num_starts is not None:
            self._slots.finish(wanted.slots, run.num_starts, wanted.positions, found.token_ids)
        else:
            self._slots.append(wanted.slots[stands], wanted.positions[stands], found.token_ids[stands])
        failed = self._constraints.drawn(rows, counts) if self._constraints.is_used else {}
        top_rows = {}
        if chosen or found.top_token_ids.shape[1]:
            place_of = np.cumsum(stands) - 1
            for index in np.flatnonzero(stands & (num_tops > 0)).tolist():
                tops = slice(0, num_tops[index])
                of_token = found.top_token_ids[index, tops].tobytes(), found.top_logprobs[index, tops].tobytes()
                top_rows[int(place_of[index])] = of_token
            top_rows |= {int(place_of[index]): of_token for index, of_token in chosen.items() if stands[index]}
        num_wanted, by_new_requests = (b"", 0) if self._drafting is None else self._drafting.verified(rows, counts)
        result = StepResult(
            step_id=step.step_id,
            rank=self._rank,
            weight_version=0,
            token_ids=found.token_ids[stands].tobytes(),
            logprobs=found.logprobs[stands].tobytes(),
            ranks=found.ranks[stands].tobytes(),
            counts=counts.astype(np.int32).tobytes(),
            top_rows=top_rows,
            dispatch_ns=step.dispatch_ns,
            num_drafts=rows.num_drafts.tobytes() if step.num_drafts else b"",
            num_wanted=num_wanted,
            failed=failed,
            num_wanted_by_new_requests=by_new_requests,
        )
        for row, count in run.prompt_rows.items():
            first_kept = int(run.kept_ends[row] - rows.counts[row])
            result.prompt_rows[row] = self._prompt_logprobs(run, row, first_kept + np.arange(count))
        return result

    def _chosen(self, logits: np.ndarray, slots: np.ndarray, drawn: Scores) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """Of rows whose samples name tokens: these and their log-probabilities, by their distance from the drawn token's."""
        for row in np.flatnonzero(self._slots.names_tokens[slots]).tolist():
            token_ids = self._slots.logprob_token_ids[slots[row]]
            with np.errstate(invalid="ignore"):
                logprobs = logits[row, token_ids] - logits[row, drawn.token_ids[row]] + drawn.logprobs[row]
            yield row, (token_ids.tobytes(), np.nan_to_num(logprobs, nan=-np.inf, neginf=-np.inf).astype(np.float32).tobytes())

    def draw(self, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> Scores:
        """The next token of each slot."""
        if self._communicator is None:
            return sampler.sample(logits, self._slots, slots, positions)
        num_top = sampler.num_top(logits, self._slots, slots)
        return exchanged(
            self._communicator,
            len(slots),
            num_top,
            lambda own: sampler.sample(logits[own], self._slots, slots[own], positions[own]),
        )

    def _take_drawn(self, run: StepRun, found: Scores) -> None:
        """What the device drew, and what it had guessed."""
        wanted = run.wanted
        for part, fetch in run.fetches:
            numbers, count = fetch.wait(), part.stop - part.start
            if self._inputs.layers is not None:
                numbers, read = numbers[:-1], numbers[-1, :count]
                self._slots.token_ids[wanted.slots[part], wanted.positions[part] - 1] = read
            if not run.drawn[part].any():
                continue
            places = np.arange(part.start, part.stop)[run.drawn[part]]
            numbers = numbers[:, places - part.start]
            found.token_ids[places] = numbers[0]
            if len(numbers) > 1:
                has_logprob = self._slots.sampling["num_logprobs"][wanted.slots[places]] >= 0
                found.logprobs[places] = np.where(has_logprob, numbers[1].view(np.float32), np.float32(0))
                found.ranks[places] = np.where(has_logprob, numbers[2], 0)

    def _parts(self, row_ids: np.ndarray) -> Iterator[slice]:
        """As many of them as have logits at a time."""
        for begin in range(0, len(row_ids), self._inputs.max_logit_rows):
            yield slice(begin, min(begin + self._inputs.max_logit_rows, len(row_ids)))

    def _enqueue(self, plan: Plan, row_ids: np.ndarray) -> Fetch:
        self._inputs.set_logit_rows(row_ids)
        return self._device.fetch("logits", plan.logits())

    def _logits(self, run: StepRun, row_ids: np.ndarray, first: Fetch | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Logits [m, vocab] of the step's kept rows `row_ids`, some at a time, and which of them these are; `first`: those that
        are under way. The time until the next are asked for counts as sampling."""
        for part in self._parts(row_ids):
            fetch = first if first is not None and part.start == 0 else self._enqueue(run.plan, row_ids[part])
            logits = np.ascontiguousarray(fetch.wait()[: part.stop - part.start])  # Paddle's may be a slice of wider rows
            begin_ns = time.monotonic_ns()
            yield part, logits
            run.sample_ns += time.monotonic_ns() - begin_ns

    def _score(self, logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> Scores:
        """As `draw`, of tokens that are known."""
        if self._communicator is None:
            return sampler.score(logits, token_ids, num_top)
        num_top = min(num_top, logits.shape[1])
        return exchanged(
            self._communicator, len(token_ids), num_top, lambda own: sampler.score(logits[own], token_ids[own], num_top)
        )

    def _prompt_logprobs(self, run: StepRun, row: int, kept_rows: np.ndarray) -> PromptLogprobs:
        """Of the tokens after the first positions of `row`, those of the step's `kept_rows`."""
        slot, first = int(run.rows.slots[row]), int(run.rows.starts[row]) + 1
        token_ids = self._slots.token_ids[slot, first : first + len(kept_rows)]
        num_top = int(self._slots.sampling["num_prompt_logprobs"][slot])
        found = Scores.of(token_ids, num_top)
        for part, logits in self._logits(run, kept_rows):
            found.put(part, self._score(logits, token_ids[part], num_top))
        return PromptLogprobs(
            start=first,
            num_top=num_top,
            token_logprobs=found.logprobs.tobytes(),
            token_ranks=found.ranks.tobytes(),
            top_token_ids=found.top_token_ids.tobytes(),
            top_logprobs=found.top_logprobs.tobytes(),
        )
