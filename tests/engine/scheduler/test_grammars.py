"""Sequences with grammars that the ranks have not compiled yet wait; others do not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.messages import CompileGrammar, Grammar, SamplingParams
from engine.scheduler.grammars import MAX_ASKED, MAX_KNOWN, MAX_SEEN, Grammars
from engine.scheduler.sequence import Sequence
from tests.engine.scheduler.sequences import make_sample
from tests.engine.scheduler.simulation import Simulation, Stream, simulate


def form(simulation: Simulation, text: str = "start: /a/", **options: object) -> Stream:
    return simulation.submit([1, 2, 3], grammar=Grammar(text), **options)


def test_only_constrained_sequences_wait_for_grammars(directory: Path) -> None:
    with simulate(directory) as simulation:
        simulation.rank.compiles = False
        bound, again = form(simulation), form(simulation)
        free = [simulation.submit([index, 5], max_tokens=20) for index in range(4)]
        thinking = form(simulation, "")  # that alone is bound
        simulation.finish(*free, thinking)
        assert (bound.token_ids, again.token_ids) == ([], [])
        assert len(set(simulation.rank.grammars)) == 1  # which both have
        simulation.rank.compiles = True
        simulation.finish()
        simulation.rank.compiles = False
        simulation.finish(form(simulation))  # is known
        simulation.check()
        simulation.check_idle()


def test_lives_and_deaths(directory: Path) -> None:
    """A restarted rank knows no grammar; the scheduler dies; a waiting sequence ends."""
    with simulate(directory) as simulation:
        simulation.finish(form(simulation))
        running = form(simulation, max_tokens=30)
        simulation.start(running)
        simulation.restart_rank()
        simulation.rank.compiles = False
        waiting, left = form(simulation), form(simulation, "start: /b/")
        free = simulation.submit([7], max_tokens=9)
        simulation.finish(free, running)
        simulation.abort(left)
        simulation.restart_rank()
        simulation.rank.compiles = False
        simulation.finish(simulation.submit([8]))
        assert len(simulation.rank.grammars) >= 1
        simulation.restart_scheduler()
        simulation.finish(simulation.submit([9]))
        assert waiting.token_ids == []
        simulation.rank.compiles = True
        simulation.finish(waiting)
        simulation.check(running, waiting, free)


def test_each_rank_has_it_before_it_is_used(directory: Path) -> None:
    with simulate(directory, tensor_parallel_size=2) as simulation:
        simulation.ranks[1].compiles = False
        bound = form(simulation)
        simulation.finish(simulation.submit([4]))
        assert bound.token_ids == []
        simulation.ranks[1].compiles = True
        simulation.finish(bound)


def sequence_with(text: str) -> Sequence:
    sequence = make_sample("r", [1])
    sequence.request = msgspec.structs.replace(sequence.request, sampling=SamplingParams(grammar=Grammar(text)))
    return sequence


def test_number_of_known_grammars_is_bounded() -> None:
    asked: list[CompileGrammar] = []
    grammars = Grammars(1, asked.append)
    for number in (*range(MAX_KNOWN + 1), MAX_KNOWN, 1, 0):
        sequence = sequence_with(f"{number}")
        grammars.want(sequence)
        grammars.look_ahead([sequence])
        grammars.compiled(asked[-1].number, 0)
        grammars.look_ahead([sequence])
        assert not sequence.awaits_grammar
    assert [message.text for message in asked] == [*map(str, range(MAX_KNOWN + 1)), "0"]


def test_only_the_first_waiting_grammars_are_requested() -> None:
    """Compiling all ahead would make ranks forget them before their turn."""
    asked: list[CompileGrammar] = []
    grammars = Grammars(1, asked.append)
    waiting = [sequence_with(f"{number}") for number in range(3 * MAX_SEEN)]
    for sequence in waiting:
        grammars.want(sequence)
    grammars.look_ahead(waiting)
    assert [message.text for message in asked] == [*map(str, range(MAX_ASKED))]
    assert all(sequence.awaits_grammar for sequence in waiting)
    grammars.look_ahead(waiting[-1:])  # the others were aborted
    assert len(asked) == MAX_ASKED
    for message in [*asked]:
        grammars.compiled(message.number, 0)
    grammars.look_ahead(waiting[-1:])
    assert [message.text for message in asked[MAX_ASKED:]] == [f"{3 * MAX_SEEN - 1}"]
