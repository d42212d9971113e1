"""Ranks with CUDA's rows, each on an emulated card of its own, give one rank's bytes; they exchange tensors through gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.checkpoint.model_config import ModelConfig
from engine.supervisor.port import reserve_port
from ops.cuda import table as cuda
from ops.table import DeviceSampler
from tests.configurations import engine_config
from tests.ops.cuda.card import emulated_card
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_checkpoint
from tests.workers.rank_group.expert_serving import share_experts
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.serving import Answers, serve, serve_all
from tests.workers.rank_group.test_tensor_parallel import ODD_EXPERTS, on_each
from tests.workers.test_cuda_rows import OnEmulatedCard
from workers.devices.card_ops import CardRows
from workers.devices.paddle import PaddleDevice
from workers.rank_group.communicator import Communicator
from workers.rank_group.rendezvous import Rendezvous
from workers.selftest.op_choice import take_rows
from workers.weights.precision import Precision

pytestmark = pytest.mark.slow
CARD: dict[str, Any] = {"ops": "reference", "kind": OnEmulatedCard, "plan": "eager", "max_model_len": 48, "sequences": (3, 3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    write_checkpoint(path, ODD_EXPERTS)
    return path


def take(communicator: Communicator, port: int, breaks_all: bool) -> list[object]:
    """Run one rank: return the ops that it takes when rows of the second one's card are wrong, all of them or the sampling
    ones."""
    rows = cuda.make_table(emulated_card())
    linear, drawing = rows.linear, rows.drawing
    assert drawing is not None
    if communicator.rank == 1 and breaks_all:
        rows = replace(rows, linear=lambda x, module: linear(x, module) * 1.1)
    elif communicator.rank == 1:
        rows = replace(rows, drawing=DeviceSampler(lambda inputs, logits: drawing.run(inputs, logits) * 0, is_greedy=False))
    options = {"tensor_parallel_size": 2, "group_ports": (port,), "num_kv_blocks": 2, "max_model_len": 64}
    config = engine_config(model="", run_id="", run_dir="", ops="reference", **options)
    meetings = Rendezvous.of(config, communicator.rank, communicator, None)
    assert meetings is not None
    meetings.open_stores()
    device = PaddleDevice("cpu", communicator.rank, meetings)
    model = ModelConfig.read(GOLDEN / "llama")
    found = take_rows(device, CardRows(lambda rank_group: rows), model, Precision(), "float32")
    return [found and found.ops.drawing is not None, found and found.fallbacks]


@pytest.mark.parametrize(("breaks_all", "found"), [(True, [None, None]), (False, [False, (("draw", "sample"),)])])
def test_ops_wrong_on_one_card_are_not_used(breaks_all: bool, found: list[object]) -> None:
    """Otherwise it would wait in a collective that the others do not call."""
    emulated_card()  # compiled before each rank asks for it
    with reserve_port("127.0.0.1", 0) as port, rank_group_of(2) as rank_group:
        assert rank_group.run(take, port.getsockname()[1], breaks_all) == [found] * 2


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    emulated_card()  # compiled before each rank asks for it
    return serve(model, CARD)


def test_two_ranks_equal_one_rank(model: Path, alone: Answers) -> None:
    """Columns that begin within panels, a KV head that two ranks share, experts that are split."""
    with reserve_port("127.0.0.1", 0) as port:
        options = {**CARD, "group_ports": (port.getsockname()[1],)}
        assert on_each(2, serve_all, [(model, options)]) == [[alone]] * 2


@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_expert_parallel_ranks_equal_one_rank(model: Path, alone: Answers, plan: str) -> None:
    """Two replicas, and one is idle at first and at last; experts move before every step."""
    placements = [((0, 1, 2, 3), (4, 5, 6)), ((4, 6, 2), (0, 1, 3, 5, 2))]
    with reserve_port("127.0.0.1", 0) as first, reserve_port("127.0.0.1", 0) as second, rank_group_of(2) as rank_group:
        ports = first.getsockname()[1], second.getsockname()[1]
        settings = {**CARD, "plan": plan, "num_kv_blocks": 64, "weight_cache_dir": str(model), "group_ports": ports}
        if plan == "captured":
            settings |= {"cudagraph_capture_sizes": (2,), "max_cudagraph_capture_size": 2}
        assert rank_group.run(share_experts, model, None, placements, settings) == [alone[0::2], alone[1::2]]
