"""From hidden states of a step to its result: selects rows with logits, fetches the logits, samples and scores.

The runner's `Output`. `begin` enqueues the first logits, `end` waits for them while the device works. With several ranks, each
samples some of the rows.

Tokens sampled on the device (`DeviceSampler` in ops/table.py) reach the host in one small copy, without logits. Which rows
these are depends only on their requests; a device that samples only without temperature, which gives the same tokens anywhere,
takes either all rows of a step or none. If all rows are sampled there and nothing drafts, tokens are written where the next
step reads them, so that it can begin before the host knows them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np

from engine.messages import PromptLogprobs, StepResult
from ops.step_layout import DRAWN
from workers.devices.device import Device
from workers.devices.enqueued import Fetch
from workers.engine.inputs import StepInputs
from workers.engine.plan import Plan
from workers.engine.rows import SampledTokens, StepRows
from workers.engine.step_run import StepRun
from workers.rank_group.collectives import Collectives
from workers.sampling import sampler
from workers.sampling.rank_sampling import exchanged
from workers.sampling.sampler import Scores
from workers.sampling.slot_sampling import SlotSampling


class SampledRows(msgspec.Struct):
    """Rows of a step that get tokens, in flight."""

    prompt_rows: dict[int, int]  # rows with prompt log-probabilities -> how many of their positions give one
    wanted: SampledTokens
    kept_rows: np.ndarray  # index of each row of `wanted` among the kept rows
    drawn: np.ndarray  # bool [m], of `wanted`: sampled by the device
    num_starts: np.ndarray | None = None  # of the slots of `wanted`, if their tokens stay on the device for the next step
    fetches: list[tuple[slice, Fetch]] = []  # sampled tokens, for a part of `wanted` each
    first: Fetch | None = None  # logits of the first part


class StepSampling:
    """Samples and scores on the host, with the native sampler, what the device does not sample."""

    def __init__(
        self, rank: int, device: Device, inputs: StepInputs, sampling: SlotSampling, ranks: Collectives, *, runs_ahead: bool
    ) -> None:
        """`rank`: reported in results. `runs_ahead`: a step may begin before the host knows the tokens of the last one."""
        self._rank, self._device, self._inputs = rank, device, inputs
        self._slots, self._sampling, self._ranks = sampling.slots, sampling, ranks
        self._drawing = device.ops.drawing if inputs.is_made_on_device else None
        self._runs_ahead = runs_ahead
        self._num_begun = 0

    def prepare(self, run: StepRun) -> tuple[np.ndarray, np.ndarray | None]:
        rows = run.rows
        prompt_rows = self._prompt_rows(rows)
        kept_counts = rows.num_sampled.copy()
        for row in prompt_rows:
            kept_counts[row] = rows.counts[row]
        if run.keeps_all is not None:
            kept_counts = np.where(run.keeps_all, rows.counts, kept_counts)
        run.kept_ends = kept_counts.cumsum()
        wanted = SampledTokens.of(rows)
        kept_rows = (run.kept_ends - rows.num_sampled)[wanted.rows] + wanted.places
        run.output = SampledRows(prompt_rows, wanted, kept_rows, np.zeros(len(kept_rows), np.bool_))
        return kept_counts, self._flags(run, run.output)

    def _prompt_rows(self, rows: StepRows) -> dict[int, int]:
        """Return rows with prompt log-probabilities -> how many of their first positions give one: position p gives that of
        token p + 1, so the last one of the prompt gives none."""
        result = {}
        for row in np.flatnonzero(self._sampling.wants_prompt_logprobs[rows.slots]).tolist():
            last = int(self._slots.num_prompt_tokens[rows.slots[row]]) - 1
            count = min(int(rows.ends[row]), last) - int(rows.starts[row])
            if count > 0:
                result[row] = count
        return result

    def _flags(self, run: StepRun, sampled: SampledRows) -> np.ndarray | None:
        """Choose the tokens that the device samples; return the flags for `DeviceInputs.set_rows`."""
        if self._drawing is None:
            return None
        slots = sampled.wanted.slots
        sampled.drawn = self._sampling.is_plain[slots]
        if self._drawing.is_greedy:
            of_slots = self._sampling.records[slots]
            is_greedy = sampled.drawn & (of_slots["temperature"] <= 0) & (of_slots["num_logprobs"] < 0)
            sampled.drawn = np.full(len(slots), is_greedy.all())
        run.is_sampled_on_device = bool(sampled.drawn.all()) and not sampled.prompt_rows and self._runs_ahead
        flags: np.ndarray = DRAWN * ((run.rows.num_sampled == 1) & run.is_sampled_on_device)
        return flags

    def begin(self, run: StepRun) -> None:
        """Enqueue the first logits and their copy to the host, and all sampling on the device."""
        sampled: SampledRows = run.output
        if sampled.drawn.any() or run.fetch_draft_tokens is not None:
            self._num_begun += 1
            for part in self._parts(sampled.kept_rows):
                self._inputs.set_logit_rows(sampled.kept_rows[part])
                logits = run.plan.logits()
                key = f"drawn.{self._num_begun % 2}.{part.start}"  # the one of the step before is in flight
                sampled.fetches.append((part, self._device.fetch(key, run.plan.drawn(logits))))
                if part.start == 0 and not sampled.drawn.all():
                    sampled.first = self._device.fetch("logits", logits)
        elif len(sampled.kept_rows):
            sampled.first = self._enqueue(run.plan, sampled.kept_rows[: self._inputs.max_logit_rows])
        if run.is_sampled_on_device:
            sampled.num_starts = self._slots.num_starts[sampled.wanted.slots]
            self._slots.begin(sampled.wanted.slots, sampled.wanted.positions)

    def end(self, run: StepRun) -> StepResult:
        """Return the step's result; its tokens are in the slots then."""
        sampled: SampledRows = run.output
        step, rows, wanted = run.step, run.rows, sampled.wanted
        num_tops = self._sampling.records["num_logprobs"][wanted.slots]
        found = Scores.of(np.empty(len(wanted.slots), np.int32), max(0, int(num_tops.max(initial=0))))
        chosen: dict[int, tuple[bytes, bytes]] = {}  # by place in `wanted`: requested tokens
        self._take_drawn(sampled, found)
        for part, logits in () if sampled.drawn.all() else self._logits(run, sampled.kept_rows, sampled.first):
            own = np.flatnonzero(~sampled.drawn[part])
            of_host, rest = own + part.start, logits if len(own) == len(logits) else logits[own]
            drawn = self.draw(rest, wanted.slots[of_host], wanted.positions[of_host])
            found.put(of_host, drawn)
            chosen |= {int(of_host[row]): named for row, named in self._chosen(rest, wanted.slots[of_host], drawn)}
        accepted, counts = wanted.accepted(rows, found.token_ids, self._slots.token_ids)
        if run.late_rows:
            accepted, counts = accepted & ~np.isin(wanted.rows, run.late_rows), counts.copy()
            counts[run.late_rows] = 0
        if sampled.num_starts is not None:
            self._slots.finish(wanted.slots, sampled.num_starts, wanted.positions, found.token_ids)
        else:
            self._sampling.append(wanted.slots[accepted], wanted.positions[accepted], found.token_ids[accepted])
        run.counts = counts
        result = StepResult(
            step_id=step.step_id,
            rank=self._rank,
            weight_version=0,
            token_ids=found.token_ids[accepted].tobytes(),
            logprobs=found.logprobs[accepted].tobytes(),
            ranks=found.ranks[accepted].tobytes(),
            counts=counts.astype(np.int32).tobytes(),
            top_rows=_top_rows(found, num_tops, accepted, chosen),
            dispatch_ns=step.dispatch_ns,
            num_drafts=rows.num_drafts.tobytes() if step.num_drafts else b"",
        )
        for row, count in sampled.prompt_rows.items():
            first_kept = int(run.kept_ends[row] - rows.counts[row])
            result.prompt_rows[row] = self._prompt_logprobs(run, row, first_kept + np.arange(count))
        return result

    def _chosen(self, logits: np.ndarray, slots: np.ndarray, drawn: Scores) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """Yield the tokens named by the rows' requests, with log-probabilities computed from the sampled token's."""
        for row in np.flatnonzero(self._sampling.names_tokens[slots]).tolist():
            token_ids = self._sampling.logprob_token_ids[slots[row]]
            with np.errstate(invalid="ignore"):
                logprobs = logits[row, token_ids] - logits[row, drawn.token_ids[row]] + drawn.logprobs[row]
            yield row, (token_ids.tobytes(), np.nan_to_num(logprobs, nan=-np.inf, neginf=-np.inf).astype(np.float32).tobytes())

    def draw(self, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> Scores:
        """Sample the next token of each slot."""
        if self._ranks.count == 1:
            return sampler.sample(logits, self._sampling, slots, positions)
        num_top = sampler.num_top(logits, self._sampling, slots)
        return exchanged(
            self._ranks,
            len(slots),
            num_top,
            lambda own: sampler.sample(logits[own], self._sampling, slots[own], positions[own]),
        )

    def _take_drawn(self, sampled: SampledRows, found: Scores) -> None:
        """Put the tokens sampled by the device into `found`, and its draft tokens into the slots."""
        wanted = sampled.wanted
        for part, fetch in sampled.fetches:
            numbers, count = fetch.wait(), part.stop - part.start
            if self._inputs.layers is not None:
                numbers, read = numbers[:-1], numbers[-1, :count]
                self._slots.token_ids[wanted.slots[part], wanted.positions[part] - 1] = read
            if not sampled.drawn[part].any():
                continue
            places = np.arange(part.start, part.stop)[sampled.drawn[part]]
            numbers = numbers[:, places - part.start]
            found.token_ids[places] = numbers[0]
            if len(numbers) > 1:
                has_logprob = self._sampling.records["num_logprobs"][wanted.slots[places]] >= 0
                found.logprobs[places] = np.where(has_logprob, numbers[1].view(np.float32), np.float32(0))
                found.ranks[places] = np.where(has_logprob, numbers[2], 0)

    def _parts(self, row_ids: np.ndarray) -> Iterator[slice]:
        """Yield parts of the rows, of as many as have logits at a time."""
        for begin in range(0, len(row_ids), self._inputs.max_logit_rows):
            yield slice(begin, min(begin + self._inputs.max_logit_rows, len(row_ids)))

    def _enqueue(self, plan: Plan, row_ids: np.ndarray) -> Fetch:
        self._inputs.set_logit_rows(row_ids)
        return self._device.fetch("logits", plan.logits())

    def _logits(self, run: StepRun, row_ids: np.ndarray, first: Fetch | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield logits [m, vocab] of the step's kept rows `row_ids`, part by part, with the indexes; `first`: those in flight.
        The time until the next part is requested counts as sampling."""
        for part in self._parts(row_ids):
            fetch = first if first is not None and part.start == 0 else self._enqueue(run.plan, row_ids[part])
            logits = np.ascontiguousarray(fetch.wait()[: part.stop - part.start])  # Paddle's may be a slice of wider rows
            begin_ns = time.monotonic_ns()
            yield part, logits
            run.sample_ns += time.monotonic_ns() - begin_ns

    def _score(self, logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> Scores:
        """Score known tokens, divided among ranks as in `draw`."""
        if self._ranks.count == 1:
            return sampler.score(logits, token_ids, num_top)
        num_top = min(num_top, logits.shape[1])
        return exchanged(self._ranks, len(token_ids), num_top, lambda own: sampler.score(logits[own], token_ids[own], num_top))

    def _prompt_logprobs(self, run: StepRun, row: int, kept_rows: np.ndarray) -> PromptLogprobs:
        """Score the tokens after the first positions of `row`, which are the step's `kept_rows`."""
        slot, first = int(run.rows.slots[row]), int(run.rows.starts[row]) + 1
        token_ids = self._slots.token_ids[slot, first : first + len(kept_rows)]
        num_top = int(self._sampling.records["num_prompt_logprobs"][slot])
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


def _top_rows(
    found: Scores, num_tops: np.ndarray, accepted: np.ndarray, chosen: dict[int, tuple[bytes, bytes]]
) -> dict[int, tuple[bytes, bytes]]:
    """Return ids and log-probabilities of the best tokens, or of the `chosen` ones, by place among the accepted tokens."""
    if not chosen and not found.top_token_ids.shape[1]:
        return {}
    top_rows = {}
    place_of = np.cumsum(accepted) - 1
    for index in np.flatnonzero(accepted & (num_tops > 0)).tolist():
        tops = slice(0, num_tops[index])
        of_token = found.top_token_ids[index, tops].tobytes(), found.top_logprobs[index, tops].tobytes()
        top_rows[int(place_of[index])] = of_token
    return top_rows | {int(place_of[index]): of_token for index, of_token in chosen.items() if accepted[index]}
