"""Ranks with CUDA's rows, each on an emulated card of its own, give one rank's bytes; what they exchange goes through gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.supervisor.port import reserve_port
from tests.ops.cuda.card import emulated_card
from tests.workers.checkpoints import write_checkpoint
from tests.workers.parallel.expert_serving import share_experts
from tests.workers.parallel.gangs import gang_of
from tests.workers.parallel.serving import Answers, serve, serve_all
from tests.workers.parallel.test_tensor_parallel import ODD_EXPERTS, on_each
from tests.workers.test_cuda_rows import OnEmulatedCard

pytestmark = pytest.mark.slow
CARD: dict[str, Any] = {"ops": "reference", "kind": OnEmulatedCard, "plan": "eager", "max_model_len": 48, "samples": (3, 3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    write_checkpoint(path, ODD_EXPERTS)
    return path


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    emulated_card()  # compiled before each rank asks for it
    return serve(model, CARD)


def test_two_ranks_give_the_bytes_of_one(model: Path, alone: Answers) -> None:
    """Columns that begin within panels, a KV head that two ranks share, experts that are cut."""
    with reserve_port("127.0.0.1", 0) as port:
        options = {**CARD, "group_ports": (port.getsockname()[1],)}
        assert on_each(2, serve_all, [(model, options)]) == [[alone]] * 2


@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_ranks_that_share_experts_give_the_bytes_of_one(model: Path, alone: Answers, plan: str) -> None:
    """Two replicas, of which one is idle at first and at last; experts move before every step."""
    placements = [((0, 1, 2, 3), (4, 5, 6)), ((4, 6, 2), (0, 1, 3, 5, 2))]
    with reserve_port("127.0.0.1", 0) as first, reserve_port("127.0.0.1", 0) as second, gang_of(2) as gang:
        ports = first.getsockname()[1], second.getsockname()[1]
        settings = {**CARD, "plan": plan, "num_kv_blocks": 64, "weight_cache_dir": str(model), "group_ports": ports}
        if plan == "captured":
            settings |= {"cudagraph_capture_sizes": (2,), "max_cudagraph_capture_size": 2}
        assert gang.run(share_experts, model, None, placements, settings) == [alone[0::2], alone[1::2]]
