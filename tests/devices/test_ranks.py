"""Two ranks that capture on devices of their own: a size that one cannot capture, neither replays; with shared experts, graphs
stay valid when experts move.
"""

from __future__ import annotations

import os
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from engine.supervisor.port import reserve_port
from shm.segment import MemoryFile
from tests.devices.board import Board
from tests.devices.build import NAME, environment
from tests.workers.checkpoints import write_checkpoint
from tests.workers.rank_group.expert_serving import share_experts
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.serving import serve
from tests.workers.rank_group.test_tensor_parallel import ARENA_BYTES, ODD_EXPERTS
from workers.rank_group.communicator import Communicator

pytestmark = pytest.mark.slow
SIZES = [4, 2, 1]


def capture(communicator: Communicator, variables: dict[str, str], port: int, limits: list[int]) -> list[Any]:
    """Run one rank. For each limit of bytes of a capture on device 1 (0: none) return answers, the sizes that could not be
    captured, and the log lines about them."""
    os.environ.update(variables)
    from tests.devices import on_device  # Paddle has the device from here on

    board = Board(Path(variables["TOKASIM_BOARD"]))
    rank_group: dict[str, Any] = {"communicator": communicator, "rank": communicator.rank, "tensor_parallel_size": 2}
    rank_group |= {"group_ports": (port,), "weight_cache_dir": str(board.path.parent)}
    found = []
    for limit in limits:
        communicator.barrier()
        board.set(capture_bytes=limit, capture_devices=1 << 1)
        communicator.barrier()
        found.append(on_device.answers_of("qwen3", "captured", **rank_group))
    return found


def share(
    communicator: Communicator, variables: dict[str, str], path: Path, arena: tuple[DupFd, int] | None, options: dict[str, Any]
) -> list[Any]:
    """Run one rank; return the answers while experts move before every step."""
    os.environ.update(variables)
    from workers.runners import xpu_runner

    placements = [((0, 1, 2, 3), (4, 5, 6)), ((4, 6, 2), (0, 1, 3, 5, 2))]
    return share_experts(communicator, path, arena, placements, {**options, "kind": xpu_runner})


@pytest.mark.parametrize("is_one_replica", [False, True], ids=["two replicas", "two ranks of one"])
def test_steps_with_shared_experts_are_replayed(plugin: Path, tmp_path: Path, is_one_replica: bool) -> None:
    """An idle replica replays the same steps as the other. Graphs stay valid when experts move. When one rank loads its weights
    again, as after a command for it alone, all capture anew."""
    board = Board(tmp_path / "board")
    board.set(delay_seed=7)
    write_checkpoint(tmp_path, ODD_EXPERTS)
    alone = serve(tmp_path, {"ops": "reference", "plan": "eager", "max_model_len": 256})
    sizes = (4, 2) if not is_one_replica else (8, 5)
    options = {"ops": "reference", "device": NAME, "plan": "captured", "cudagraph_capture_sizes": sizes, "num_kv_blocks": 64}
    options |= {"max_cudagraph_capture_size": sizes[0], "max_model_len": 256, "weight_cache_dir": str(tmp_path)}
    options["loads_again"] = 1
    arena = MemoryFile.create("tokamak-test-arena", ARENA_BYTES)
    with reserve_port("127.0.0.1", 0) as first, reserve_port("127.0.0.1", 0) as second, rank_group_of(2) as rank_group:
        options["group_ports"] = (first.getsockname()[1], second.getsockname()[1])
        ranks = []
        for rank in range(2):
            memory = (DupFd(arena.fd), ARENA_BYTES) if is_one_replica else None
            ranks.append(rank_group.start(rank, share, environment(plugin, board), tmp_path, memory, options))
        found = [rank.answer() for rank in ranks]
    assert found == ([alone, alone] if is_one_replica else [alone[0::2], alone[1::2]])
    for device in range(2):
        counts = board.counts(device)
        assert counts["captures"] == 1 + 2 * len(sizes), "one to see whether there are graphs"
        assert counts["replays"] > 2 * len(sizes)


def test_uncapturable_size_is_replayed_by_neither_rank(plugin: Path, tmp_path: Path) -> None:
    """Wherever a capture fails, neither rank waits for the other, and both log the sizes that run op by op."""
    board = Board(tmp_path / "board")
    board.set(delay_seed=7)
    limits = [0, 1 << 8, 1 << 18, 1 << 19, 1 << 20]
    with reserve_port("127.0.0.1", 0) as port, rank_group_of(2) as rank_group:
        first, other = rank_group.run(capture, environment(plugin, board), port.getsockname()[1], limits)
    expected = first[0][0]
    assert [answers for answers, _, _ in (*first, *other)] == [expected] * 2 * len(limits)
    assert [sizes for _, sizes, _ in first] == [sizes for _, sizes, _ in other]
    assert (first[0][1], first[1][1]) == ([], sorted(SIZES))
    for (_, sizes, said), (_, _, of_other) in zip(first, other, strict=True):
        assert [line.split(":", 1)[0].split()[2] for line in said] == [str(size) for size in sorted(sizes, reverse=True)]
        assert all(line.endswith("Place(tokasim:0): another rank cannot capture it") for line in said)
        assert all("memory" in line.lower() for line in of_other)
    assert board.counts(device=1)["replays"] > 5
