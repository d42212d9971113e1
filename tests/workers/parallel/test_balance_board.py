"""What ranks tell each other of where experts lie: a death decides between the old placement and the new one for all alike."""

from __future__ import annotations

import numpy as np

from engine.checkpoint.comm_spec import balance_bytes
from engine.checkpoint.model_config import ModelConfig
from engine.parallel.placement import linear, round_robin
from tests.paths import GOLDEN
from workers.parallel.balance_board import MAX_VERSION, BalanceBoard, InForce, next_version

MODEL = ModelConfig.read(GOLDEN / "qwen3_moe")


def boards() -> tuple[BalanceBoard, BalanceBoard]:
    """Of two ranks."""
    arena = np.zeros(balance_bytes(MODEL, 2) + 640, np.uint8)
    return BalanceBoard(arena, MODEL, 2, 0), BalanceBoard(arena, MODEL, 2, 1)


def test_a_placement_is_proposed_and_put_in_force() -> None:
    leader, other = boards()
    assert MODEL.experts is not None
    num_layers, num_experts = len(MODEL.experts.sparse_layers), MODEL.experts.num_experts
    placement = (round_robin(num_experts, 2, num_experts + 3),) * num_layers
    before = leader.seal(7)
    leader.propose(7, 1, placement)
    assert (other.proposed(7), other.proposed(8)) == (1, None)
    assert other.placement(1) == placement
    other.say_ready(7, 1)
    assert [leader.is_ready(rank, 7, 1) for rank in (0, 1)] == [False, True]
    assert leader.replace(before, InForce.of(7, 12, 1))
    found = other.in_force
    assert (found.epoch, found.number, found.version) == (7, 12, 1)
    leader.propose(7, 2, (linear(num_experts, 2, num_experts),) * num_layers)
    assert other.placement(1) == placement  # until the next but one


def test_what_was_sealed_is_not_replaced() -> None:
    """The leader of an epoch that is over comes too late; or in time, and then all that join the next find its version."""
    leader, other = boards()
    seen = leader.seal(3)
    assert other.seal(4).version == 0
    assert not leader.replace(seen, InForce.of(3, 9, 1))
    assert leader.seal(4).word == other.in_force.word
    assert leader.replace(leader.in_force, InForce.of(4, 9, 1))
    assert (other.seal(5).version, leader.seal(5).version, other.in_force.number) == (1, 1, 0)


def test_ranks_count_apart() -> None:
    first, second = boards()
    first.counts[0, 0, 1] += np.uint64(5)
    assert second.counts.sum(axis=0)[0, 1] == 5
    assert second.counts[1].sum() == 0


def test_versions_have_turns() -> None:
    version, seen = 0, []
    for _ in range(2 * MAX_VERSION):
        following = next_version(version)
        assert following % 2 != version % 2
        assert 0 < following <= MAX_VERSION
        seen.append(version := following)
    assert len(set(seen)) == MAX_VERSION
