"""Ranks with CUDA's ops, each on an emulated card, give one rank's bytes; columns, and rows of shared experts, go through
memory that they lend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_adapter
from tests.ops.cuda.card import emulated_library
from tests.workers.checkpoints import write_checkpoint
from tests.workers.deepseek import CONFIG as DEEPSEEK
from tests.workers.on_card import on_card
from tests.workers.rank_group.expert_serving import outlive
from tests.workers.rank_group.rank_groups import rank_group_of
from tests.workers.rank_group.serving import serve, serve_all
from tests.workers.rank_group.test_expert_parallel import answers_of
from tests.workers.rank_group.test_tensor_parallel import ODD, ODD_EXPERTS, ODD_WEIGHTED, ODD_WIDE, on_each

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": ODD,
    "experts": ODD_EXPERTS,
    "weighted": ODD_WEIGHTED,
    "wide norms": ODD_WIDE,
    "latents": {**DEEPSEEK, "rms_norm_eps": 1e-6, "vocab_size": 1003},
}

PLACEMENTS = [((0, 1, 2, 3), (4, 5, 6)), ((4, 6, 2), (0, 1, 3, 5, 2))]
GRAPHS = {"plan": "captured", "cudagraph_capture_sizes": (4, 2), "max_cudagraph_capture_size": 4}


def sharing(**options: Any) -> dict[str, Any]:
    emulated_library()  # compiled before each rank asks for it
    return {**on_card(), "max_model_len": 64, "sequences": (3, 6), **options}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        write_checkpoint(directory / name, config)
    return {name: directory / name for name in CONFIGS}


@pytest.mark.parametrize("of", ["shapes", "options"])
def test_two_ranks_equal_one_rank(models: dict[str, Path], of: str) -> None:
    """Columns that begin anywhere, a KV head that two ranks share, experts that are split; replayed steps, rounded weights."""
    card = sharing(sequences=(3, 3), max_num_seqs=4)
    jobs = [(path, card) for name, path in models.items() if name != "weighted"]
    if of == "options":
        narrow = {**card, **GRAPHS, "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
        jobs = [(models["dense"], {**card, **GRAPHS}), (models["experts"], narrow)]
        jobs.append((models["dense"], {**card, "quantization": "wint4"}))
    expected = [serve(*job) for job in jobs]
    for found in on_each(2, serve_all, jobs):
        for job, answers, alone in zip(jobs, found, expected, strict=True):
            assert answers == alone, job


@pytest.mark.parametrize("is_one_replica", [False, True], ids=["two replicas", "two ranks of one"])
@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_shared_experts_have_the_bytes_of_one_rank(
    models: dict[str, Path], plan: str, is_one_replica: bool, tmp_path: Path
) -> None:
    """Experts move before every step, one has two copies, each replica has sequences of its own, some with an adapter."""
    path = models["experts" if plan == "captured" else "weighted"]
    options = sharing(**({**GRAPHS, "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"} if plan == "captured" else {}))
    options |= {"weight_cache_dir": str(tmp_path), "adapters": [write_adapter(tmp_path / "adapter", path, size=0.02)]}
    alone = serve(path, options)
    found = answers_of(2, path, PLACEMENTS, options, is_one=is_one_replica)
    assert found == ([alone, alone] if is_one_replica else [alone[0::2], alone[1::2]])


@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_rank_on_a_card_continues_alone(models: dict[str, Path], plan: str, tmp_path: Path) -> None:
    """The other rank ends between two steps, or while the first one's card waits for it in a replayed step. The graphs stay."""
    options = sharing(**(GRAPHS if plan == "captured" else {}), max_num_batched_tokens=512, weight_cache_dir=str(tmp_path))
    with rank_group_of(2) as rank_group:
        first, second = (rank_group.start(rank, outlive, models["experts"], 4, options) for rank in range(2))
        assert second.answer() == []
        second.kill()
        rank_group.header.set_member(1, False)
        num_broken, num_steps, *found = first.answer()
    assert (num_broken, num_steps >= 6) == (1, True)
    assert found == serve(models["experts"], {**options, "max_num_seqs": 32})
