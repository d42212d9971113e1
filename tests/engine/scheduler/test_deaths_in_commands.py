"""Kill -9 at every point of every command.

Whatever dies, the engine is in the state before the command or in the one after it, never in a mixture, and no version number
is used twice. There are two ranks; their weights, the record and the streams must agree.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine.messages import (
    DropWeights,
    Order,
    Pause,
    ReloadWeights,
    ResetPrefixCache,
    Resume,
    SamplingParams,
    Step,
    WeightsState,
)
from engine.process.events import EventSender
from engine.process.run_directory import Run, WeightsRecord
from engine.scheduler.commands import SchedulerCommands
from engine.scheduler.dispatch import Dispatcher
from engine.scheduler.weight_updates import WeightUpdates
from tests.engine.scheduler.simulation import Simulation, Stream, expected_tokens, ints, simulate

B, C, D = "/weights/b", "/weights/c", "/weights/d"
MIXED = ReloadWeights(C, ranks=[1])  # each rank has weights of its own then


@dataclass(frozen=True)
class Case:
    """Commands that were carried out before, and the one in which a process dies."""

    before: tuple[Order, ...]
    order: Order


CASES = {
    **{f"pause, {mode}": Case((), Pause(mode)) for mode in ("abort", "wait", "requeue", "keep")},
    "sleep": Case((MIXED,), Pause("requeue", "sleep")),
    "clear": Case((MIXED, Pause("requeue")), DropWeights()),
    "resume": Case((Pause("requeue"),), Resume()),
    "wake": Case((MIXED, Pause("requeue", "sleep")), Resume()),
    "reload": Case((), ReloadWeights(B)),
    "reload, wait": Case((MIXED,), ReloadWeights(B, "wait")),
    "reload of what is paused": Case((Pause("requeue"),), ReloadWeights(B)),
    "reload of what is cleared": Case((MIXED, DropWeights("requeue")), ReloadWeights(B)),
    "reload of one rank": Case((), MIXED),
    "reset": Case((), ResetPrefixCache()),
}


class Killed(BaseException):
    """Death of the scheduler at this point."""


Point = tuple[str, str, int]  # function, call or return, which time
_FUNCTIONS: list[Callable[..., Any]] = [
    *(SchedulerCommands.handle, Run.write_weights, Dispatcher.send, EventSender.send),
    *(vars(WeightUpdates)[name] for name in ("begin", "rank_answered", "_succeed", "write", "_end")),
]
_CODES = {function.__code__ for function in _FUNCTIONS}


class Mortal:
    """Runs the scheduler and kills it at a point: before or after anything that another process can see."""

    def __init__(self, death: Point | None = None) -> None:
        self.points: list[Point] = []
        self._death = death
        self._counts: Counter[tuple[str, str]] = Counter()

    def turn(self, simulation: Simulation) -> None:
        sys.settrace(self._enter)
        try:
            simulation.loop.turn()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code not in _CODES or isinstance(frame.f_locals.get("message"), Step):
            return None
        frame.f_trace_lines = False
        self._pass(frame, "call")
        return self._leave

    def _leave(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return":
            self._pass(frame, "return")

    def _pass(self, frame: FrameType, event: str) -> None:
        name = frame.f_code.co_name
        self._counts[name, event] += 1
        point = (name, event, self._counts[name, event])
        self.points.append(point)
        if point == self._death:
            raise Killed


@contextmanager
def prepared(case: Case) -> Iterator[tuple[Simulation, WeightsRecord]]:
    """Return two running sequences, a waiting one, and the state before the command."""
    with (
        tempfile.TemporaryDirectory(prefix="tokamak-test-") as directory,
        simulate(Path(directory), max_num_seqs=2, tensor_parallel_size=2) as simulation,
    ):
        streams = [simulation.submit([index, 7, 9], seed=index, max_tokens=14) for index in range(3)]
        simulation.start(*streams[:2], num_tokens=2)
        for order in case.before:
            assert simulation.ask(order).status == 200
        yield simulation, simulation.run.weights()


def walk(simulation: Simulation, case: Case, mortal: Mortal, after_turn: Callable[[int], None] = lambda turn: None) -> int:
    """Carry out the command, one record of one rank per turn; return the status of the reply."""
    command_id = simulation.order(case.order)
    turn = 0
    while command_id not in simulation.replies:
        mortal.turn(simulation)
        simulation.ranks[turn % 2].turn(1)
        simulation.collect()
        after_turn(turn)
        turn += 1
        assert turn < 10_000, "the order is never answered"
    return simulation.replies[command_id].status


def outcome(case: Case) -> tuple[WeightsRecord, list[Point], int]:
    """Return the state after the command without deaths, the points on the way there, and the number of turns."""
    turns: list[int] = []
    mortal = Mortal()
    with prepared(case) as (simulation, _):
        assert walk(simulation, case, mortal, turns.append) == 200
        return simulation.run.weights(), [point for point in mortal.points if point[2] <= 2], len(turns)


def check(simulation: Simulation, case: Case, *allowed: WeightsRecord) -> None:
    """Check that all agree on one of these states, and that everything continues to the end of every stream and to weights of a
    new version."""
    record = simulation.run.weights()
    facts = [(found.path, found.version, found.state, found.ranks) for found in (record, *allowed)]
    assert facts[0] in facts[1:]
    if record.state is WeightsState.NORMAL:
        simulation.finish()
    simulation.run_until(lambda: simulation.turn() == 0, "rest")
    assert simulation.run.weights() == record
    assert WeightsState(int(simulation.metric("engine_state"))) is record.state
    is_cleared = record.state is WeightsState.CLEARED
    for rank, weights in zip(simulation.ranks, record.ranks, strict=True):
        assert (rank.version == 0) if is_cleared else ((rank.path, rank.version) == weights)
    if record.state is not WeightsState.NORMAL:
        new_request = simulation.submit([5, 5])
        simulation.run_until(lambda: simulation.turn() == 0, "rest")
        num_open = sum(not stream.is_over for stream in simulation.streams.values())
        counts = simulation.metric("num_requests_running"), simulation.metric("num_requests_waiting")
        assert sum(counts) == num_open > 0
        assert not new_request.outputs
        assert simulation.ask(Resume()).status == 200
        simulation.finish()
    for number, stream in enumerate(simulation.streams.values()):
        check_stream(simulation, stream)
        if isinstance(case.order, ReloadWeights) and case.order.mode == "wait" and number < 3:
            assert {output.weight_version for output in stream.outputs} == {1}
    last = simulation.ask(ReloadWeights(D)).details["weight_version"]
    assert last == max(simulation.paths) > max(record.last_version, *(found.last_version for found in allowed[:1]))
    simulation.check_idle()


def check_stream(simulation: Simulation, stream: Stream) -> None:
    """Check that the versions of its tokens only increase, and that the tokens of each version are right."""
    versions = [output.weight_version for output in stream.outputs if output.token_ids]
    assert versions == sorted(versions)
    tokens, seed = ints(stream.request.prompt.token_ids), stream.request.sampling.seed
    for version, count in Counter(versions).items():
        tokens += expected_tokens(tokens, SamplingParams(seed=seed, max_tokens=count), simulation.paths[version])
    assert stream.token_ids == tokens[len(stream.request.prompt.token_ids) // 4 :]
    if stream.finish_reason != "abort":
        assert (stream.finish_reason, len(stream.token_ids)) == ("length", stream.request.sampling.max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_scheduler_dies(name: str) -> None:
    """Ranks that had not read its last messages yet read them under its successor."""
    case = CASES[name]
    after, points, _ = outcome(case)
    assert points
    for number, death in enumerate(points):
        with prepared(case) as (simulation, before):
            with pytest.raises(Killed):
                walk(simulation, case, Mortal(death))
            if number % 2:
                for rank in simulation.ranks:
                    rank.turn()
            simulation.restart_scheduler()
            check(simulation, case, before, after)


@pytest.mark.parametrize("name", ["sleep", "wake", "reload of what is paused", "reload of one rank"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_dies(name: str, index: int) -> None:
    """The answer names the rank."""
    case = CASES[name]
    after, _, num_turns = outcome(case)
    for death in range(num_turns - 1):
        with prepared(case) as (simulation, before):

            def die(turn: int, simulation: Simulation = simulation, death: int = death) -> None:
                if turn == death:
                    simulation.kill_rank(index)
                    simulation.revive_rank(index)

            status = walk(simulation, case, Mortal(), die)
            assert status in (200, 503)
            check(simulation, case, after if status == 200 else before)
