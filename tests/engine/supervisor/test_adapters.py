"""Adapters at the supervisor: assignment and release of slots, and one answer to each command, whichever process dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.config import LoraModule
from engine.messages import Adapter, AdaptersRecord, Command, LoadAdapter, Reply, UnloadAdapter
from engine.process.run_directory import Run, new_run_id
from engine.process.segments import rows_of
from engine.supervisor.adapters import QUIET_NS, AdapterCommands
from shm.counters import Counters
from tests.configurations import engine_config

NAMES = ("supervisor", "api0", "api1", "scheduler", "worker0", "worker1")
TURN_NS = QUIET_NS + 1


class Desk:
    """The commands with stand-ins: `told`: name and slot of the loads of the first rank; `answers`: status and text by command.
    `turn` is one of the supervisor's."""

    def __init__(self, directory: Path, *modules: LoraModule, max_loras: int = 2) -> None:
        run_id = new_run_id()
        self.run = Run(run_id, directory)
        self.run.write_adapters(AdaptersRecord())
        self.counters = Counters.create(run_id, NAMES, partial(rows_of, max_loras=max_loras))
        sizes = {"max_model_len": 64, "num_kv_blocks": 8, "max_loras": max_loras, "max_lora_rank": 8}
        config = engine_config(model="m", run_id=run_id, run_dir=str(directory), lora_modules=modules, **sizes)
        self.told: list[tuple[str, str, int]] = []
        self.answers: dict[str, tuple[int, str]] = {}
        self.freed: tuple[int, ...] = ()  # slots that the last of these loads may free
        self.trouble = ""
        self.now_ns = 1
        self.orders = AdapterCommands(self.run, config, self.counters, NAMES, self._tell, self._answer)

    def _tell(self, actor: str, command: Command) -> str:
        assert actor == "worker0"
        assert isinstance(command.order, LoadAdapter)
        if not self.trouble:
            self.told.append((command.command_id, command.order.name, command.order.slot))
            self.freed = command.order.other_free_slots
        return self.trouble

    def _answer(self, reply: Reply) -> None:
        assert reply.command_id not in self.answers
        self.answers[reply.command_id] = (reply.status, reply.message)

    def load(self, command_id: str, name: str, *, replaces: bool = False) -> None:
        self.orders.begin(Command(command_id, LoadAdapter(name, f"/{name}", replaces)))

    def unload(self, command_id: str, name: str) -> None:
        self.orders.begin(Command(command_id, UnloadAdapter(name)))

    def loaded(self, contents: str = "ab") -> None:
        """Report that the rank has carried out the last load."""
        assert self.orders.take(Reply(self.told[-1][0], 200, "", {"contents": contents, "rank": 8}))

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_ns += TURN_NS
            self.orders.advance(self.now_ns)

    def has(self, actor: str, gauge: str, slot: int, count: int) -> None:
        self.counters.counter(gauge, actor, adapter_slot=str(slot)).set(count)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return self.run.adapters().adapters

    @property
    def names(self) -> list[str]:
        """Return the names, with a dash before those that are leaving."""
        return ["-" * each.is_leaving + each.name for each in self.adapters]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.counters.close()
    made.counters.unlink()


def test_load_is_recorded_before_its_answer(desk: Desk) -> None:
    version = desk.counters.counter("adapters_version", "supervisor")
    before = time.time()
    desk.load("1", "a")
    assert (desk.told, desk.answers, version.value) == ([("1", "a", 0)], {}, 0)
    desk.load("2", "b")
    assert len(desk.told) == 1, "one after another"
    desk.loaded("aa")
    (found,) = desk.adapters
    assert found == Adapter("a", "/a", 1, 0, "aa", 8, found.loaded_at)
    assert before <= found.loaded_at <= time.time()
    assert (version.value, desk.answers["1"][0], desk.told[1:]) == (1, 200, [("2", "b", 1)])
    assert desk.orders.take(Reply("2", 400, "it is wrong"))
    assert (desk.names, desk.answers["2"]) == (["a"], (400, "it is wrong"))
    assert not desk.orders.take(Reply("2", 200, "twice"))
    desk.load("3", "c")
    desk.loaded()
    assert [(each.number, each.slot) for each in desk.adapters] == [(1, 0), (2, 1)]


def test_load_frees_memory_of_every_unused_slot(tmp_path: Path) -> None:
    """Slots of adapters that were unloaded, or failed; the one in progress, and those in use, keep theirs."""
    desk = Desk(tmp_path, max_loras=4)
    try:
        for number, name in enumerate("ab"):
            desk.load(str(number), name)
            desk.loaded()
        desk.unload("u", "a")
        desk.turns(4)
        assert desk.answers["u"][0] == 200
        desk.load("2", "c")
        assert (desk.told[-1], desk.freed) == (("2", "c", 0), (2, 3))
    finally:
        desk.counters.close()
        desk.counters.unlink()


def test_slot_is_released_without_open_sequences(desk: Desk) -> None:
    """Every scheduler counts; a slot is free after zero was seen twice."""
    desk.load("1", "a")
    desk.loaded()
    for number, (actor, gauge) in enumerate(
        [
            ("api1", "adapter_open_requests"),
            ("scheduler", "adapter_requests_running"),
            ("scheduler", "adapter_requests_waiting"),
        ]
    ):
        desk.has(actor, gauge, 0, 1)
        desk.unload(f"u{number}", "a")
        desk.turns(4)
        assert (desk.names, desk.answers.get(f"u{number}")) == (["-a"], None)
        desk.has(actor, gauge, 0, 0)
        desk.turns()
        assert desk.names == ["-a"]
        desk.turns()
        assert desk.names == []
        desk.has(actor, gauge, 0, 1)  # of an api that died: a sample was on its way
        desk.turns(4)
        assert f"u{number}" not in desk.answers
        desk.has(actor, gauge, 0, 0)
        desk.turns(2)
        assert desk.answers[f"u{number}"][0] == 200
        desk.load(f"l{number}", "a")
        assert desk.told[-1][2] == 0
        desk.loaded()


def test_single_zero_count_releases_no_slot(desk: Desk) -> None:
    desk.load("1", "a")
    desk.loaded()
    desk.unload("2", "a")
    desk.orders.advance(1)
    desk.orders.advance(QUIET_NS)
    desk.has("api0", "adapter_open_requests", 0, 1)
    desk.orders.advance(2 * QUIET_NS)
    desk.has("api0", "adapter_open_requests", 0, 0)
    desk.orders.advance(2 * QUIET_NS + 1)
    assert desk.names == ["-a"]


def test_adapter_is_replaced_under_its_name(desk: Desk) -> None:
    """The old adapter leaves; its name is the new one's at once."""
    desk.load("1", "a")
    desk.loaded("aa")
    desk.load("2", "a")
    assert (desk.answers["2"][0], "already loaded" in desk.answers["2"][1]) == (400, True)
    desk.has("api0", "adapter_open_requests", 0, 1)
    desk.load("3", "a", replaces=True)
    desk.loaded("bb")
    assert desk.answers["3"][0] == 200
    assert [(each.contents, each.slot, each.is_leaving) for each in desk.adapters] == [("aa", 0, True), ("bb", 1, False)]
    desk.load("4", "b")
    assert (desk.answers["4"][0], "(a wait for open requests)" in desk.answers["4"][1]) == (409, True)
    desk.unload("5", "a")
    desk.unload("6", "a")
    assert (desk.answers["6"][0], "being unloaded already" in desk.answers["6"][1]) == (409, True)
    desk.turns(4)
    assert desk.answers["5"][0] == 200
    desk.has("api0", "adapter_open_requests", 0, 0)
    desk.turns(4)
    assert desk.names == []


def test_invalid_commands_are_refused(desk: Desk) -> None:
    for command_id, name in (("1", "a"), ("2", "b")):
        desk.load(command_id, name)
        desk.loaded()
    desk.load("3", "c")
    assert (desk.answers["3"][0], "all 2 adapter slots are in use" in desk.answers["3"][1]) == (400, True)
    desk.unload("4", "c")
    assert desk.answers["4"][0] == 404
    desk.load("5", "test")
    assert (desk.answers["5"][0], "is already a name of the model" in desk.answers["5"][1]) == (400, True)
    for command_id, name in (("8", "a b"), ("9", ""), ("10", "a,b"), ("11", "a\n")):
        desk.load(command_id, name)
        assert (desk.answers[command_id][0], "expected a name of printable characters" in desk.answers[command_id][1]) == (
            400,
            True,
        )
    desk.unload("6", "a")
    desk.turns(4)
    desk.trouble = "worker0 is not ready; try again in a moment"
    desk.load("7", "c")
    assert desk.answers["7"] == (503, desk.trouble)


def test_the_rank_dies_meanwhile(desk: Desk) -> None:
    desk.load("1", "a")
    desk.load("2", "b")
    desk.orders.actor_died("worker1", "killed")
    assert desk.answers == {}
    desk.trouble = "worker0 is not ready"
    desk.orders.actor_died("worker0", "killed")
    assert {command_id: status for command_id, (status, _) in desk.answers.items()} == {"1": 503, "2": 503}
    assert not desk.orders.take(Reply("1", 200, "", {"contents": "aa"}))
    desk.trouble = ""
    desk.load("3", "a")
    assert desk.told[-1] == ("3", "a", 0)


def test_unrecorded_load_is_undone(desk: Desk) -> None:
    desk.load("1", "a")
    desk.loaded()
    desk.load("2", "b")
    (desk.run.directory / ".adapters.json.new").mkdir()
    desk.loaded()
    assert (desk.answers["2"][0], "cannot be recorded" in desk.answers["2"][1]) == (503, True)
    desk.unload("3", "a")
    assert desk.answers["3"][0] == 503
    (desk.run.directory / ".adapters.json.new").rmdir()
    desk.unload("4", "a")
    desk.turns(4)
    assert (desk.names, desk.answers["4"][0]) == ([], 200)


def test_the_end_of_the_engine_is_an_answer(desk: Desk) -> None:
    desk.load("1", "a")
    desk.loaded()
    desk.has("api0", "adapter_open_requests", 0, 1)
    desk.unload("2", "a")
    desk.load("3", "b")
    desk.orders.refuse_open("SIGTERM")
    assert [desk.answers[command_id][0] for command_id in "23"] == [503, 503]
    desk.turns(4)


def test_command_line_adapters_are_loaded_first(tmp_path: Path) -> None:
    """Whichever process dies meanwhile; an invalid one ends the start."""
    desk = Desk(tmp_path, LoraModule("a", "/a"), LoraModule("b", "/b"))
    desk.trouble = "worker0 is not ready"
    desk.turns(2)
    desk.trouble = ""
    desk.turns()
    assert desk.told == [("start/a", "a", 0)]
    desk.orders.actor_died("worker0", "killed")
    desk.turns()
    assert desk.told == [("start/a", "a", 0)] * 2
    desk.loaded()
    assert not desk.orders.is_started
    desk.turns()
    assert desk.orders.take(Reply("start/b", 400, "/b is not a directory"))
    assert (desk.orders.failure, desk.answers, desk.names) == ("--lora-modules b: /b is not a directory", {}, ["a"])
    desk.turns()
    desk.counters.close()
    desk.counters.unlink()


def test_an_engine_without_slots_takes_none(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_loras=0)
    assert desk.orders.is_started
    desk.load("1", "a")
    desk.unload("2", "a")
    desk.turns()
    assert all(status == 400 and "start the engine with --enable-lora" in text for status, text in desk.answers.values())
    desk.counters.close()
    desk.counters.unlink()
