"""Threads of ranks that are bound to memory nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.options.resolve_ranks import available_cores, resolve_threads
from tests.workers.checkpoints import write_checkpoint


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "expected"), [(1, (9,), 9), (2, (6, 3), 3), (4, (8, 8), 4), (3, (4, 4), 2), (4, (1, 1), 1)]
)
def test_threads_fit_the_node_of_the_rank(
    num_ranks: int, sizes: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert available_cores() >= 1
    monkeypatch.setattr("engine.options.resolve_ranks.available_cores", lambda: sum(sizes))
    nodes = [tuple(range(size)) for size in sizes]
    options = read_options(["/none"], {})
    assert resolve_threads(options, num_ranks, nodes) == expected
    asked = read_options(["/none", "--threads", str(expected + 1)], {})
    assert resolve_threads(asked, num_ranks, nodes) == expected + 1
    assert bool(asked.notes) == (num_ranks > 1)


def test_heads_of_recurrent_layers_are_divided(tmp_path: Path) -> None:
    """Its attention has heads for four ranks, its recurrent layers only for two."""
    config = {
        **{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 96, "hidden_size": 64},
        **{"intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "max_position_embeddings": 512},
    }
    write_checkpoint(tmp_path, config)
    options = [str(tmp_path), "--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
    assert resolve(read_options([*options, "-tp", "2"], {}))[0].num_ranks == 2
    with pytest.raises(OptionError, match=r"4 does not divide the 2 heads of the model's recurrent .*; use one of \[1, 2\]"):
        resolve(read_options([*options, "-tp", "4"], {}))
