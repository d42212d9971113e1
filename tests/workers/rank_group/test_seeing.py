"""Ranks that share a vision model: each encodes some of the units, all read them, and all know of missing ones."""

from __future__ import annotations

from multiprocessing.reduction import DupFd

import pytest

from shm.encoder_arena import EncoderArena
from shm.segment import MemoryFile
from tests.paths import GOLDEN
from tests.workers.encoding import make_slab, units_of
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.seeing import see
from tests.workers.seeing import golden_prompts, shape_of_arena
from tests.workers.serving import golden_cases

KV_BYTES = 32 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "ernie4_5_vl_moe"])
def test_two_ranks_agree_with_transformers(name: str) -> None:
    slab = make_slab()
    rows = MemoryFile.create("rows", EncoderArena.num_bytes_of(*shape_of_arena(GOLDEN / name)))
    kv = MemoryFile.create("kv", KV_BYTES)
    calls = [units_of(name, sequence, case, slab) for case, sequence in enumerate(golden_prompts(name))]
    with rank_group_of(2) as rank_group:
        shared = [(DupFd(memory.fd), memory.num_bytes) for _ in range(2) for memory in (kv, rows, slab.memory)]
        ranks = [rank_group.start(rank, see, *shared[3 * rank : 3 * rank + 3], name, calls) for rank in range(2)]
        expected = [case["greedy_token_ids"] for case in golden_cases(name)]
        assert [rank.answer() for rank in ranks] == [(["rank 1 reads no pixels"], expected)] * 2
