"""Ranks that share experts give one rank's bytes, however the work is distributed and whether they share rows too."""

from __future__ import annotations

import os
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.comm_spec import comm_bytes, expert_windows_bytes
from engine.checkpoint.model_config import ModelConfig
from engine.parallel.placement import LayerPlacement, linear, round_robin
from shm.rank_group import RankGroupHeader
from shm.segment import MemoryFile
from tests.adapters import write_adapter
from tests.configurations import engine_config
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_checkpoint
from tests.workers.rank_group.expert_serving import outlive, share_experts
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.serving import serve
from tests.workers.test_variants import VARIANTS
from workers.rank_group.communicator import Communicator
from workers.rank_group.experts import ExpertRank

ARENA_BYTES = 32 << 20
PAGE = 4096
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "wint8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "wint4", "plan": "eager"},
    "captured": {"plan": "captured", "cudagraph_capture_sizes": (4, 2), "max_cudagraph_capture_size": 4},
}


def answers_of(
    num_ranks: int, path: Path, placements: list[LayerPlacement], options: dict[str, Any], *, is_one: bool
) -> list[Any]:
    """Return the answers of each rank; `is_one`: they are one replica."""
    with rank_group_of(num_ranks) as rank_group:
        arena = MemoryFile.create("tokamak-test-arena", ARENA_BYTES)
        ranks = [
            rank_group.start(
                rank,
                share_experts,
                path,
                (DupFd(arena.fd), ARENA_BYTES) if is_one else None,
                placements,
                options | {"num_kv_blocks": 64, "max_num_batched_tokens": 512},
            )
            for rank in range(num_ranks)
        ]
        return [rank.answer() for rank in ranks]


def placements_of(path: Path, num_ranks: int, num_redundant: int) -> list[LayerPlacement]:
    model = ModelConfig.read(path).experts
    assert model is not None
    shape = (model.num_experts, num_ranks, model.num_experts + num_redundant)
    return [linear(*shape), round_robin(*shape)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "ernie4_5_moe", "ernie4_5_vl_moe"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_replicas_sharing_experts_equal_one_rank(name: str, precision: str, tmp_path: Path) -> None:
    """Each has its own sequences; three experts have two copies, and all move before every step. In some
    precisions with an adapter."""
    path, options = GOLDEN / name, PRECISIONS[precision] | {"weight_cache_dir": str(tmp_path)}
    if precision in ("float32", "int4"):
        options["adapters"] = [write_adapter(tmp_path / "adapter", path, size=0.02)]
    expected = serve(path, options)
    found = answers_of(2, path, placements_of(path, 2, 3), options, is_one=False)
    assert found == [expected[0::2], expected[1::2]]


@pytest.mark.parametrize("precision", ["float32", "int4", "captured"])
def test_tensor_ranks_sharing_experts_equal_one_rank(precision: str, tmp_path: Path) -> None:
    """With adapters of experts in the captured case."""
    path, options = GOLDEN / "qwen3_moe", PRECISIONS[precision] | {"weight_cache_dir": str(tmp_path)}
    if precision == "captured":
        options["adapters"] = [write_adapter(tmp_path / "adapter", path, size=0.02)]
    expected = serve(path, options)
    assert answers_of(2, path, placements_of(path, 2, 1), options, is_one=True) == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_moe", "llama4_text chunks, scaled queries, two experts", "gpt_oss", "gpt_oss mxfp4"])
def test_variants_sharing_experts_equal_one_rank(name: str, tmp_path: Path) -> None:
    path, options = tmp_path / "model", {"weight_cache_dir": str(tmp_path), "max_model_len": 256}
    write_checkpoint(path, VARIANTS[name]["config"] | {"vocab_size": 1024})
    expected = serve(path, options)
    found = answers_of(2, path, placements_of(path, 2, 1), options, is_one=False)
    assert found == [expected[0::2], expected[1::2]]
    assert answers_of(2, path, placements_of(path, 2, 1), options, is_one=True) == [expected] * 2


def test_remaining_rank_continues_alone(tmp_path: Path) -> None:
    """A rank ends between two steps; the other drops its step, computes all experts, and answers the same."""
    path, options = GOLDEN / "qwen3_moe", {"weight_cache_dir": str(tmp_path), "max_num_batched_tokens": 512}
    with rank_group_of(2) as rank_group:
        first, second = (rank_group.start(rank, outlive, path, 5, options) for rank in range(2))
        assert second.answer() == []
        rank_group.header.set_member(1, False)
        num_broken, num_steps, *found = first.answer()
    assert (num_broken, num_steps > 8) == (1, True)
    assert found == serve(path, options)


def test_comm_arena_grows_with_the_ranks() -> None:
    model = ModelConfig.read(GOLDEN / "qwen3_moe")
    sizes = [comm_bytes(model, tensor, 4, 512, 32, shares) for tensor, shares in ((1, False), (1, True), (2, True))]
    assert sizes[0] == 0 < sizes[1] < sizes[2]


def test_decode_rows_are_resident_at_start() -> None:
    """The rest of the windows becomes resident with the first step of that size."""
    model = ModelConfig.read(GOLDEN / "qwen3_moe")
    num_bytes = comm_bytes(model, 1, 2, 512, 32, shares_experts=True)
    taken = []
    for limit in (32, 64, 512, 4096):
        memory = MemoryFile.create("tokamak-test-rank group", num_bytes)
        RankGroupHeader.begin(memory.buffer, 2)
        communicator = Communicator(memory.buffer, 1, 0, 2, timeout_s=1.0, shares_experts=True)
        before = os.fstat(memory.fd).st_blocks
        options = {"data_parallel_size": 2, "num_max_dispatch_tokens_per_rank": limit, "num_kv_blocks": 2, "max_model_len": 64}
        config = engine_config(model="", run_id="", run_dir="", **options)
        ExpertRank(communicator, config, model)
        taken.append((os.fstat(memory.fd).st_blocks - before) * 512)
        memory.close()
    whole = expert_windows_bytes(model, 2, 512)
    num_arrays = 6  # three of each rank, whose pages are counted whole
    for limit, num_taken in zip((32, 64, 512, 512), taken, strict=True):
        assert whole * limit // 512 - PAGE <= num_taken <= whole * limit // 512 + num_arrays * 2 * PAGE
