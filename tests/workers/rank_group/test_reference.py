"""Ranks with reference ops give one rank's bytes, and leave an interrupted collective."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from engine.supervisor.port import reserve_port
from shm.segment import MemoryFile
from tests.adapters import write_adapter
from tests.waiting import WATCHDOG_S
from tests.workers.checkpoints import write_checkpoint
from tests.workers.rank_group.expert_serving import share_experts
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.serving import serve, serve_all, serve_golden
from tests.workers.rank_group.test_tensor_parallel import (
    ARENA_BYTES,
    ODD,
    ODD_EXPERTS,
    ODD_LATENTS,
    ODD_SINKS,
    ODD_WIDE,
    on_each,
)
from tests.workers.serving import golden_cases
from workers.rank_group.communicator import Communicator
from workers.rank_group.rendezvous import Meeting
from workers.rank_group.store import open_store

pytestmark = pytest.mark.slow

REFERENCE = {"ops": "reference", "plan": "eager", "max_model_len": 256}


@pytest.fixture
def options() -> Iterator[dict[str, Any]]:
    """Options with ports for two groups."""
    with reserve_port("127.0.0.1", 0) as first, reserve_port("127.0.0.1", 0) as second:
        yield {**REFERENCE, "group_ports": (first.getsockname()[1], second.getsockname()[1])}


def test_two_ranks_equal_one_rank(options: dict[str, Any], tmp_path: Path) -> None:
    """Columns that begin within chunks, a KV head that two ranks share, experts that are split, latent attention."""
    jobs = []
    kinds = {"odd": ODD, "wide": ODD_WIDE, "experts": ODD_EXPERTS, "latents": ODD_LATENTS, "sinks": ODD_SINKS}
    for name, config in kinds.items():
        write_checkpoint(tmp_path / name, config)
        jobs.append((tmp_path / name, options))
    expected = [serve(*job) for job in jobs]
    for found in on_each(2, serve_all, jobs):
        assert found == expected


def test_two_ranks_agree_with_transformers(options: dict[str, Any]) -> None:
    architectures = ("llama", "qwen3_moe")
    expected = {name: [case["greedy_token_ids"] for case in golden_cases(name)[:6]] for name in architectures}
    assert on_each(2, serve_golden, architectures, {**options, "max_model_len": 512}) == [expected] * 2


@pytest.mark.parametrize(("is_one_replica", "config"), [(False, ODD_EXPERTS), (True, ODD_SINKS)])
def test_expert_parallel_ranks_equal_one_rank(
    options: dict[str, Any], tmp_path: Path, is_one_replica: bool, config: dict[str, Any]
) -> None:
    """Two replicas, and one is idle at first and at last, or the two ranks of one; experts move before every step, and an
    adapter changes them."""
    write_checkpoint(tmp_path, config)
    options = {**options, "adapters": [write_adapter(tmp_path / "adapter", tmp_path, size=0.02)]}
    alone = serve(tmp_path, options)
    placements = [((0, 1, 2, 3), (4, 5, 6)), ((4, 6, 2), (0, 1, 3, 5, 2))]
    arena = MemoryFile.create("tokamak-test-arena", ARENA_BYTES)
    with rank_group_of(2) as rank_group:
        memory = (lambda: (DupFd(arena.fd), ARENA_BYTES)) if is_one_replica else (lambda: None)
        settings = {**options, "num_kv_blocks": 64, "weight_cache_dir": str(tmp_path)}
        ranks = [rank_group.start(rank, share_experts, tmp_path, memory(), placements, settings) for rank in range(2)]
        found = [rank.answer() for rank in ranks]
    assert found == ([alone, alone] if is_one_replica else [alone[0::2], alone[1::2]])


def cut(communicator: Communicator, port: int) -> None:
    """Run a collective in which rank 1 ends; return rank 0's error."""
    if communicator.rank == 0:
        open_store(port)
    import paddle

    from workers.devices.groups import PaddleGroup

    group = PaddleGroup(Meeting(communicator, port, "tensor.1"), "cpu")
    assert group.all_gather(paddle.full([1, 2], 3.0)).tolist() == [[[3.0, 3.0]]] * 2
    if communicator.rank == 1:
        communicator.barrier()
        os._exit(9)
    group.all_gather(paddle.zeros([1, 2]))


def test_new_epoch_ends_a_cut_collective(options: dict[str, Any]) -> None:
    with rank_group_of(2) as rank_group:
        first, second = (rank_group.start(rank, cut, options["group_ports"][0]) for rank in range(2))
        second.process.join(WATCHDOG_S)
        assert second.process.exitcode == 9
        rank_group.header.set_member(1, False)
        kind, *_ = first.answer()
        assert kind == "RankGroupBroken"
