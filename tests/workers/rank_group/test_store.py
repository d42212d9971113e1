"""The store of groups, used by Paddle's own clients; and the names of groups in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from paddle.base import core

from engine.supervisor.port import reserve_port
from shm.rank_group import RankGroupHeader, buffers_at
from tests.configurations import engine_config
from tests.waiting import WATCHDOG_S
from workers.rank_group.communicator import Communicator
from workers.rank_group.rendezvous import Rendezvous
from workers.rank_group.store import LOOPBACK, GroupStore


def test_store_serves_paddle_clients() -> None:
    """The store uses a reserved port, and the loopback only."""
    with reserve_port(LOOPBACK, 0) as holder, ThreadPoolExecutor(1) as thread:
        store = GroupStore(holder.getsockname()[1])
        assert store.server_address == holder.getsockname()
        one, other = (core.TCPStore(LOOPBACK, store.server_address[1], False, 2) for _ in range(2))
        waiting = thread.submit(lambda: (one.wait("key"), one.get("key")))
        assert [other.add("arrived", 1), other.add("arrived", 2)] == [1, 3]
        other.set("key", "value")
        assert waiting.result(WATCHDOG_S) == (None, b"value")


def test_each_epoch_has_its_own_store_prefix() -> None:
    """Keys that dead processes left in a store are not read."""
    memory = memoryview(bytearray(buffers_at(2)))
    RankGroupHeader.begin(memory, 2)
    tensor, experts = (Communicator(memory, 1, 0, 2, timeout_s=1.0, shares_experts=shares) for shares in (False, True))
    options = {"tensor_parallel_size": 2, "group_ports": (7, 9), "num_kv_blocks": 2, "max_model_len": 64}
    config = engine_config(model="", run_id="", run_dir="", ops="reference", **options)
    for epoch in (1, 2):
        found = Rendezvous.of(config, 1, tensor, experts, epoch)
        assert found is not None
        assert found.tensor is not None
        assert found.experts is not None
        assert (found.tensor.life, found.experts.life) == (f"tensor.{epoch}", f"experts.{epoch}")
        assert (found.tensor.port, found.experts.port) == (7, 9)
    assert Rendezvous.of(engine_config(model="", run_id="", run_dir="", **options), 1, tensor, experts) is None, "native ops"
