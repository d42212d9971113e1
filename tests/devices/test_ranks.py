"""Two ranks that capture on devices of their own: what one of them cannot, neither replays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.supervisor.port import reserve_port
from tests.devices.board import Board
from tests.devices.build import environment
from tests.workers.parallel.gangs import gang_of
from workers.parallel.communicator import Communicator

pytestmark = pytest.mark.slow
SIZES = [4, 2, 1]


def capture(communicator: Communicator, variables: dict[str, str], port: int, limits: list[int]) -> list[Any]:
    """One rank: for each number of bytes that captures of device 1 have at most (0: any), answers, the sizes that could not be
    captured, and what was said of them."""
    os.environ.update(variables)
    from tests.devices import on_device  # Paddle has the device from here on

    board = Board(Path(variables["TOKASIM_BOARD"]))
    gang: dict[str, Any] = {"communicator": communicator, "rank": communicator.rank, "tensor_parallel_size": 2}
    gang |= {"group_ports": (port,), "weight_cache_dir": str(board.path.parent)}
    found = []
    for limit in limits:
        communicator.barrier()
        board.set(capture_bytes=limit, capture_devices=1 << 1)
        communicator.barrier()
        found.append(on_device.answers_of("qwen3", "captured", **gang))
    return found


def test_what_one_rank_cannot_capture_none_replays(plugin: Path, tmp_path: Path) -> None:
    """However far it came: neither waits for the other, and both say which sizes are run op by op."""
    board = Board(tmp_path / "board")
    board.set(delay_seed=7)
    limits = [0, 1 << 8, 1 << 18, 1 << 19, 1 << 20]
    with reserve_port("127.0.0.1", 0) as port, gang_of(2) as gang:
        first, other = gang.run(capture, environment(plugin, board), port.getsockname()[1], limits)
    expected = first[0][0]
    assert [answers for answers, _, _ in (*first, *other)] == [expected] * 2 * len(limits)
    assert [sizes for _, sizes, _ in first] == [sizes for _, sizes, _ in other]
    assert (first[0][1], first[1][1]) == ([], sorted(SIZES))
    for (_, sizes, said), (_, _, of_other) in zip(first, other, strict=True):
        assert [line.split(":", 1)[0].split()[2] for line in said] == [str(size) for size in sorted(sizes, reverse=True)]
        assert all(line.endswith("Place(tokasim:0): another rank cannot capture it") for line in said)
        assert all("memory" in line.lower() for line in of_other)
    assert board.counts(device=1)["replays"] > 5
