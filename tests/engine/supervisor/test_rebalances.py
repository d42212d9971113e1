"""A command to move experts is answered once, whichever process dies, and only one is in progress."""

from __future__ import annotations

import pytest

from engine.messages import Command, RebalanceExperts, Reply
from engine.supervisor.rebalances import Rebalances


class Desk:
    """The commands with stand-ins: `told`: the actors and their messages; `answers`: status and text by command."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.answers: dict[str, tuple[int, str]] = {}
        self.trouble = ""
        self.rebalances = Rebalances(self._tell, self._answer)

    def _tell(self, actor: str, command: Command) -> str:
        self.told.append((actor, command.command_id))
        return self.trouble

    def _answer(self, reply: Reply) -> None:
        assert reply.command_id not in self.answers
        self.answers[reply.command_id] = (reply.status, reply.message)

    def order(self, command_id: str, members: tuple[int, ...] = (1, 2)) -> None:
        self.rebalances.begin(Command(command_id, RebalanceExperts()), members, 3)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_lowest_member_leads_and_answers(desk: Desk) -> None:
    desk.order("a")
    assert (desk.told, desk.answers) == ([("worker1", "a")], {})
    desk.order("b")
    assert desk.answers.pop("b")[0] == 409
    assert not desk.rebalances.take(Reply("c"))
    assert desk.rebalances.take(Reply("a", 200, "done"))
    assert not desk.rebalances.take(Reply("a", 200, "twice"))
    assert desk.answers == {"a": (200, "done")}


def test_its_death_is_an_answer(desk: Desk) -> None:
    desk.order("a")
    desk.rebalances.actor_died("worker2", "killed")
    assert desk.answers == {}
    desk.rebalances.actor_died("worker1", "killed")
    assert desk.answers["a"][0] == 503
    desk.order("b", members=(2,))
    desk.rebalances.refuse_open("stopped")
    assert desk.answers["b"] == (503, "the engine is stopping: stopped")
    desk.rebalances.refuse_open("stopped")


def test_unreachable_rank_is_not_waited_for(desk: Desk) -> None:
    desk.order("a", members=())
    desk.trouble = "its ring is full"
    desk.order("b")
    assert [desk.answers[command_id][0] for command_id in "ab"] == [503, 503]
    assert not desk.rebalances.is_under_way
