"""Ranks with CUDA's ops, each on an emulated card, give one rank's bytes; columns go through memory that they lend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ops.cuda.card import emulated_library
from tests.workers.checkpoints import write_checkpoint
from tests.workers.deepseek import CONFIG as DEEPSEEK
from tests.workers.on_card import on_card
from tests.workers.rank_group.serving import serve, serve_all
from tests.workers.rank_group.test_tensor_parallel import ODD, ODD_EXPERTS, ODD_WIDE, on_each

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": ODD,
    "experts": ODD_EXPERTS,
    "wide norms": ODD_WIDE,
    "latents": {**DEEPSEEK, "rms_norm_eps": 1e-6, "vocab_size": 1003},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        write_checkpoint(directory / name, config)
    return {name: directory / name for name in CONFIGS}


def test_two_ranks_equal_one_rank(models: dict[str, Path]) -> None:
    """Columns that begin anywhere, a KV head that two ranks share, experts that are split, replayed steps."""
    emulated_library()  # compiled before each rank asks for it
    card = {**on_card(), "max_model_len": 64, "sequences": (3, 3), "max_num_seqs": 4}
    graphs = {**card, "plan": "captured", "cudagraph_capture_sizes": (4, 2), "max_cudagraph_capture_size": 4}
    narrow = {**graphs, "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    jobs = [(path, card) for path in models.values()]
    jobs += [(models["dense"], graphs), (models["experts"], narrow), (models["dense"], {**card, "quantization": "wint4"})]
    expected = [serve(*job) for job in jobs]
    for found in on_each(2, serve_all, jobs):
        for job, answers, alone in zip(jobs, found, expected, strict=True):
            assert answers == alone, job
