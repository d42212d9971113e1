"""How large the buffers must be through which tensor ranks make rows whole. Pure.

Two halves take turns (`ops/cpu/gang.py`): each holds the widest rows of a step, or the logits that are computed at a time.
"""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from shm.gang import buffers_at

ROW_TILE = 16  # a step's rows are padded to a multiple, as in ops/table.py
MAX_LOGIT_ROWS = 64  # logits in memory at a time: those of a long prompt's tokens would be gigabytes
_ALIGNMENT = 64


def max_rows(max_num_tokens: int, max_num_seqs: int) -> int:
    """Rows of a step, at most."""
    return -(-max(max_num_tokens, max_num_seqs) // ROW_TILE) * ROW_TILE


def comm_bytes(model: ModelConfig, num_ranks: int, max_num_tokens: int, max_num_seqs: int) -> int:
    """Of the comm arena of so many ranks; 0: one rank has none."""
    if num_ranks == 1:
        return 0
    rows = max_rows(max_num_tokens, max_num_seqs)
    width = max(model.hidden_size, model.intermediate_size, model.num_attention_heads * model.head_dim)
    half = 4 * max(rows * width, min(MAX_LOGIT_ROWS, rows) * model.vocab_size)
    return buffers_at(num_ranks) + 2 * -(-half // _ALIGNMENT) * _ALIGNMENT
