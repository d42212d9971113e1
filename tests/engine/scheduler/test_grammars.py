"""Sequences whose grammar the ranks have yet to compile: they wait, the others do not."""

from __future__ import annotations

from pathlib import Path

from engine.messages import CompileGrammar, Grammar, SamplingParams
from engine.scheduler.grammars import MAX_KNOWN, Grammars
from tests.engine.scheduler.sequences import make_sample
from tests.engine.scheduler.simulation import Simulation, Stream, simulate


def form(simulation: Simulation, text: str = "start: /a/", **options: object) -> Stream:
    return simulation.submit([1, 2, 3], grammar=Grammar(text), **options)


def test_a_form_waits_for_its_grammar_and_nobody_for_the_form(directory: Path) -> None:
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
    """Of a rank, which then knows none, of the scheduler, and of what waits."""
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


def test_so_many_are_known() -> None:
    asked: list[str] = []

    def compile_at_once(message: CompileGrammar) -> None:
        asked.append(message.text)
        grammars.compiled(message.number, 0)

    grammars = Grammars(1, compile_at_once)
    for number in (*range(MAX_KNOWN + 1), MAX_KNOWN, 1, 0):
        sequence = make_sample("r", [1])
        sequence.request.sampling = SamplingParams(grammar=Grammar(f"{number}"))
        grammars.want(sequence)
        assert not sequence.awaits_grammar
    assert asked == [*map(str, range(MAX_KNOWN + 1)), "0"]
