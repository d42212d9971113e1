"""Several ranks give one rank's bytes: tokens, log-probabilities, of prompts too, in every precision and by every plan."""

from __future__ import annotations

from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from shm.segment import MemoryFile
from tests.paths import GOLDEN
from tests.workers.checkpoints import write_checkpoint
from tests.workers.parallel.gangs import gang_of
from tests.workers.parallel.serving import serve

ARENA_BYTES = 32 << 20

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "wint8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "wint4", "plan": "eager"},
}

# heads that end within panels, a KV head that ranks share, matrices of which the last panel is not full, and some so small that
# they run whole
ODD = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 72,
    "intermediate_size": 216,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "vocab_size": 1003,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def answers_of(num_ranks: int, path: Path, options: dict[str, Any]) -> list[Any]:
    """Of each rank."""
    with gang_of(num_ranks) as gang:
        arena = MemoryFile.create("tokamak-test-arena", ARENA_BYTES)
        ranks = [
            gang.start(rank, serve, path, (DupFd(arena.fd), ARENA_BYTES), options | {"num_kv_blocks": 64})
            for rank in range(num_ranks)
        ]
        return [rank.answer() for rank in ranks]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_ranks_give_the_bytes_of_one(precision: str) -> None:
    path = GOLDEN / "llama"
    expected = serve(None, path, None, PRECISIONS[precision])
    assert answers_of(2, path, PRECISIONS[precision]) == [expected] * 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_odd_shapes(num_ranks: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ODD)
    expected = serve(None, tmp_path, None, {"max_model_len": 256})
    assert answers_of(num_ranks, tmp_path, {"max_model_len": 256}) == [expected] * num_ranks
