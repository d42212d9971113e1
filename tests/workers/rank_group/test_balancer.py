"""Moves of experts: on all ranks before the same step, one placement at a time, whichever rank dies meanwhile."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.comm_spec import comm_bytes
from engine.checkpoint.model_config import ModelConfig
from engine.config import EplbConfig
from engine.messages import ClearWeights, encode
from engine.parallel.eplb import Topology
from engine.parallel.expert_view import expert_view
from engine.parallel.placement import owners
from shm.broadcast import BroadcastReader, BroadcastWriter
from shm.experts import ExpertTable, SharedExperts
from shm.rank_group import RankGroupHeader
from tests.configurations import engine_config
from tests.paths import GOLDEN
from tests.waiting import wait_until
from tests.workers.serving import make_runner
from workers.rank_group.balance_board import BalanceBoard
from workers.rank_group.balancer import Balancer
from workers.rank_group.communicator import Communicator
from workers.rank_group.experts import ExpertRank
from workers.rank_group.shared_step_queue import SharedStepQueue

MODEL = GOLDEN / "qwen3_moe"
RANKS = (0, 1)
SETTINGS: dict[str, Any] = {"data_parallel_size": 2, "max_model_len": 512, "num_kv_blocks": 64}
CONFIG = EplbConfig(step_interval=1, min_gain=0)


class Pair:
    """Two ranks without processes; row counts are written directly instead of by steps."""

    def __init__(self, directory: Path, config: EplbConfig = CONFIG) -> None:
        self.eplb_config = config
        model = ModelConfig.read(MODEL)
        assert model.experts is not None
        self._model, self._config = model, engine_config(model="", run_id="", run_dir="", max_num_seqs=32, **SETTINGS)
        num_bytes = comm_bytes(model, 1, 2, self._config.max_num_batched_tokens, 32, shares_experts=True)
        self._memory = memoryview(bytearray(num_bytes))
        self.header = RankGroupHeader.begin(self._memory, 2)
        own, experts = Communicator(self._memory, 0, 0, 1, timeout_s=60.0), self._expert_rank(0)
        self._runner = make_runner(MODEL, communicator=own, experts=experts, weight_cache_dir=str(directory), **SETTINGS)
        num_experts = model.experts.num_experts
        first = owners(experts.placement[0], num_experts).tobytes()
        self.table = ExpertTable.create(
            secrets.token_hex(4), SharedExperts(tuple(model.experts.sparse_layers), num_experts, 2, first)
        )
        self._topology = Topology(2, num_experts)
        self.boards = [BalanceBoard(ExpertTable.attach(self.table.segment.run_id), rank) for rank in RANKS]
        self.now_s = 0.0
        run_id = self.table.segment.run_id
        self.writer = BroadcastWriter.create(run_id, "scheduler1", 1, 1024)
        self.ring = BroadcastReader.attach(run_id, "scheduler1", 0, 1)  # the second one's
        self.begin_lives()

    def begin_lives(self) -> None:
        """Start new processes, which attach to the shared memory of those before."""
        self.experts = [self._expert_rank(rank) for rank in RANKS]
        self.balancers = [
            Balancer(
                self.experts[rank],
                self.boards[rank],
                self.eplb_config,
                self._topology,
                lambda: self._runner.weights.mixtures,
                lambda moved, imbalance: None,
                lambda reply: None,
            )
            for rank in RANKS
        ]

    def _expert_rank(self, rank: int) -> ExpertRank:
        communicator = Communicator(self._memory, rank, 0, 2, timeout_s=60.0, shares_experts=True)
        return ExpertRank(communicator, self._config, self._model)

    def set_members(self, are_members: bool) -> None:
        for rank in RANKS:
            self.header.set_member(rank, are_members)

    def close(self) -> None:
        for balancer in self.balancers:
            balancer.close()

    def begin_step(self, number: int) -> None:
        for balancer in self.balancers:
            balancer.begin_step(number)

    def advance(self) -> None:
        self.now_s += CONFIG.check_interval_s
        for balancer in self.balancers:
            balancer.advance(self.now_s)

    def count(self, *busy: int) -> None:
        """Count rows for these experts."""
        self.boards[0].counts[0][:, list(busy)] += np.uint64(100)

    def join(self) -> list[bool]:
        found = [experts.join() for experts in self.experts]
        for balancer in self.balancers:
            balancer.join()
        return found

    @property
    def versions(self) -> list[int]:
        return [experts.version for experts in self.experts]

    def put_in_force(self) -> int:
        """Propose a placement for the counts; return the step from which on it holds."""
        self.advance()
        self.begin_step(0)
        self.count(0, 1)
        wait_until(lambda: (self.advance(), self.boards[1].in_force.version == 1)[1], what="a placement is in force")
        return self.boards[1].in_force.number


@contextlib.contextmanager
def running_pair(directory: Path, config: EplbConfig = CONFIG) -> Iterator[Pair]:
    pair = Pair(directory, config)
    try:
        pair.set_members(True)
        assert pair.join() == [True, True]
        yield pair
    finally:
        pair.close()
        pair.ring.close()
        pair.writer.unlink()
        pair.table.segment.unlink()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with running_pair(tmp_path) as pair:
        yield pair


def test_all_ranks_move_before_the_same_step(pair: Pair) -> None:
    number = pair.put_in_force()
    pair.begin_step(number - 1)
    assert pair.versions == [0, 0]
    pair.begin_step(number)
    assert pair.versions == [1, 1]
    assert pair.experts[0].placement == pair.boards[1].placement(1)
    assert np.array_equal(pair.experts[0].owners, pair.experts[1].owners)


def test_statistics_cover_the_configured_interval(pair: Pair) -> None:
    """100 rows a second: those of the last ten seconds, or a little more while the leader does something else. Any process may
    read it."""
    assert expert_view(pair.table, 0, 0).recent_layers is None
    number = 0

    def has_moved() -> bool:
        nonlocal number
        number += 1
        pair.begin_step(number)
        pair.count(3)
        pair.advance()
        view = expert_view(pair.table, 0, int(pair.now_s * 1e9))
        assert view.recent_s is not None
        assert view.recent_layers is not None
        assert [layer.num_rows for layer in view.layers] == [100 * number] * len(view.layers)
        assert [layer.num_rows for layer in view.recent_layers] == [100 * view.recent_s] * len(view.layers)
        return 0 < view.recent_s < number - 1

    wait_until(has_moved, what="what was long ago is not looked back at")
    assert number > CONFIG.statistics_interval_s


def test_placement_stays_until_its_step(pair: Pair) -> None:
    """A rank may read it at any moment, however loaded others become meanwhile."""
    number = pair.put_in_force()
    placement = pair.boards[1].placement(1)
    for _ in range(2000):
        pair.begin_step(number - 1)
        pair.count(*placement[0][0][:2])  # of the same rank
        pair.advance()
    assert pair.boards[1].placement(1) == placement

    def is_next_proposed() -> bool:
        pair.begin_step(number)
        pair.count(*placement[0][0][:2])
        pair.advance()
        return pair.boards[1].proposed(pair.header.epoch) == 2

    wait_until(is_next_proposed, what="the next is proposed")


def test_placement_survives_the_death_of_all_ranks(pair: Pair) -> None:
    """The first one to come back finds no member, and takes part once it is one."""
    pair.begin_step(pair.put_in_force())
    moved = pair.experts[0].owners.copy()
    pair.close()
    pair.set_members(False)
    pair.begin_lives()
    assert pair.join() == [False, False]
    pair.set_members(True)
    assert pair.join() == [True, True]
    assert pair.versions == [1, 1]
    assert np.array_equal(pair.experts[1].owners, moved)


def test_idle_ranks_read_only_two_words(pair: Pair) -> None:
    """A change of either word, a step, or a command ends this; other ranks' proposals are noticed."""
    pair.set_members(True)
    pair.join()
    pair.advance()
    follower = pair.balancers[1]
    assert all(balancer._settled == pair.boards[0].words for balancer in pair.balancers)
    pair.count(0, 1)
    pair.begin_step(1)
    assert [balancer._settled for balancer in pair.balancers] == [None, None]
    follower.advance(pair.now_s)
    assert follower._settled is not None
    follower.rebalance("command", is_forced=False)
    assert follower._settled is None
    follower.advance(pair.now_s)  # a follower refuses
    assert follower._settled is not None
    epoch = pair.experts[0].epoch
    pair.boards[0].propose(epoch, 1, pair.experts[0].placement)
    follower.advance(pair.now_s)
    wait_until(lambda: (follower.advance(pair.now_s), pair.boards[0].is_ready(1, epoch, 1))[1], what="the other is ready")


def looks(pair: Pair) -> list[float]:
    """Return the times of the counts that the leader still remembers."""
    return [look.at_s for look in pair.balancers[0]._looks]


def test_counts_are_read_once_per_interval(tmp_path: Path) -> None:
    config = EplbConfig(step_interval=1000, min_gain=0, check_interval_s=1.0, statistics_interval_s=100.0)
    with running_pair(tmp_path, config) as pair:
        for number in range(1, 45):  # eight turns an interval, with a step and rows before each
            pair.begin_step(number)
            pair.count(3)
            pair.balancers[0].advance(number / 8)
        found = looks(pair)
        assert found == [0.125, 1.125, 2.125, 3.125, 4.125, 5.125]


def test_idle_ranks_stop_reading_counts(tmp_path: Path) -> None:
    with running_pair(tmp_path) as pair:
        pair.begin_step(1)
        pair.count(0)
        pair.advance()
        seen = looks(pair)
        for _ in range(1000):
            pair.advance()
            assert all(balancer.is_settled for balancer in pair.balancers)
        assert looks(pair) == seen == [1.0]
        pair.begin_step(2)
        assert not any(balancer.is_settled for balancer in pair.balancers)
        pair.advance()
        assert looks(pair) == [1.0, pair.now_s]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EplbConfig(step_interval=10_000, statistics_interval_s=5.0), [15.0, 16.0, 17.0, 18.0, 19.0, 20.0]),
        (EplbConfig(step_interval=10_000, window_size=3, statistics_interval_s=100.0), [17.0, 18.0, 19.0, 20.0]),
    ],
    ids=["seconds", "steps"],
)
def test_window_forgets_old_counts(tmp_path: Path, config: EplbConfig, expected: list[float]) -> None:
    with running_pair(tmp_path, config) as pair:
        for number in range(1, 21):
            pair.begin_step(number)
            pair.count(3 if number > 10 else 2)
            pair.advance()
        assert looks(pair) == expected
        counts = np.array(pair.balancers[0]._counts())
        assert counts[:, 3].tolist() == [100 * (len(expected) - 1)] * len(counts)
        assert not counts[:, 2].any()


def test_experts_wait_for_the_step_interval(tmp_path: Path) -> None:
    with running_pair(tmp_path, EplbConfig(step_interval=40, min_gain=0)) as pair:
        first = pair.experts[0].placement[0][0][:2]
        for number in range(1, 40):
            pair.begin_step(number)
            pair.count(*first)  # on one rank, so that moving pays
            pair.advance()
            assert pair.balancers[0]._found is None
            assert pair.boards[1].proposed(pair.header.epoch) is None
        pair.begin_step(40)
        pair.count(*first)
        wait_until(lambda: (pair.advance(), pair.boards[1].in_force.version == 1)[1], what="a placement is in force")


def test_idle_rank_sleeps_until_an_event(pair: Pair) -> None:
    """A record, a step that another began, a word on the board, a command, another epoch."""
    own = Communicator(pair.experts[1].communicator.header.memory, 1, 1, 1, timeout_s=60.0)
    own.join()
    turns = SharedStepQueue(pair.experts[1], own, pair.ring, [], lambda: None, pair.balancers[1])

    def has_slept() -> bool:
        turns.receive()
        assert not turns.has_turn(True)
        turns.wait(1)
        return turns.can_sleep_on

    def run_steps() -> None:
        while turns.has_turn(True):
            assert turns.begin_turn(1) is None
            turns.end_turn()

    assert not turns.can_sleep_on
    assert turns.receive() == 0
    assert has_slept()
    assert pair.writer.active_readers() == [0]
    assert pair.writer.try_send(encode(ClearWeights("command")))
    turns.wait(1)
    assert not turns.can_sleep_on
    assert turns.receive() == 1
    assert turns.next_message() == ClearWeights("command")

    assert has_slept()
    header = pair.experts[0].communicator.header
    assert header.begin_next(pair.experts[0].epoch, 0)
    turns.wait(1)
    assert not turns.can_sleep_on
    run_steps()

    assert has_slept()
    pair.boards[0].propose(pair.experts[0].epoch, 1, pair.experts[0].placement)
    assert not turns.can_sleep_on
    wait_until(lambda: (turns.receive(), pair.boards[0].is_ready(1, pair.experts[0].epoch, 1))[1], what="it is ready")

    pair.header.set_member(0, False)
    pair.header.set_member(0, True)
    own.join()
    turns.join()
    assert turns.receive() == 0
    assert pair.balancers[1].is_settled
    assert not turns.can_sleep_on
    assert has_slept()
    pair.balancers[1].rebalance("command", is_forced=False)
    assert not turns.can_sleep_on
