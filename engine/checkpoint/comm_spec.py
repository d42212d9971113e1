"""Sizes of the buffers through which ranks exchange rows. Pure.

Tensor ranks combine rows: two halves alternate (`ops/cpu/rank_group.py`), each for the widest rows of a step or the logits
computed at a time. Ranks that share the experts of all replicas have windows at the end of the arena: all rows of a step, the
experts and the adapter of each row, and a result of each expert.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.checkpoint.model_config import ModelConfig
from shm.rank_group import LINE, buffers_at

ROW_TILE = 16  # a step's rows are padded to a multiple, as in ops/table.py
_LOGIT_ROWS, _VERIFIED_LOGIT_ROWS = 64, 256


def max_rows(max_num_tokens: int, max_num_seqs: int) -> int:
    """Return the maximum number of rows in a step."""
    return -(-max(max_num_tokens, max_num_seqs) // ROW_TILE) * ROW_TILE


def max_logit_rows(num_rows: int, max_num_seqs: int, num_drafts: int) -> int:
    """Return the maximum number of rows with logits in memory at a time, in steps of `num_rows` (the logits of all tokens of a
    long prompt would be gigabytes). A step that verifies drafts keeps 1 + `num_drafts` rows of each sequence, and reads the
    head once for them."""
    num_kept = max_num_seqs * (1 + num_drafts) if num_drafts else 0
    return min(max(_LOGIT_ROWS, min(num_kept, _VERIFIED_LOGIT_ROWS)), num_rows)


def comm_bytes(
    model: ModelConfig,
    tensor_ranks: int,
    num_ranks: int,
    max_num_tokens: int,
    max_num_seqs: int,
    shares_experts: bool,
    num_drafts: int = 0,
) -> int:
    """Return the bytes of a comm arena: of one replica, or of all `num_ranks` if they share the experts. 0: a single rank has
    none."""
    rank_group_ranks = num_ranks if shares_experts else tensor_ranks
    if rank_group_ranks == 1:
        return 0
    rows = max_rows(max_num_tokens, max_num_seqs)
    num_bytes = buffers_at(rank_group_ranks)
    if tensor_ranks > 1:
        queries = model.num_attention_heads * model.largest_head_dim
        width = max(model.hidden_size, model.largest_intermediate_size, queries)
        if model.experts is not None:
            width = max(width, model.experts.shared_intermediate_size, model.experts.latent_size)
            if not shares_experts:
                width = max(width, model.experts.num_chosen * model.experts.intermediate_size)
        if model.recurrence is not None:
            width = max(width, model.recurrence.values_width)
        if (latents := model.latents) is not None:
            values = model.num_attention_heads * latents.value_dim
            width = max(width, latents.query_dim, values, latents.latent_dim + latents.rotary_dim)
        half = 4 * max(rows * width, max_logit_rows(rows, max_num_seqs, num_drafts) * model.vocab_size)
        num_bytes += 2 * -(-half // LINE) * LINE * (rank_group_ranks // tensor_ranks)
    if shares_experts:
        num_bytes += expert_windows_bytes(model, num_ranks, expert_rows(tensor_ranks, max_num_tokens, max_num_seqs))
    return num_bytes


def expert_rows(tensor_ranks: int, max_num_tokens: int, max_num_seqs: int) -> int:
    """Return the maximum number of rows that a rank sends the others: the rows of a replica are split among its ranks."""
    return -(-max_rows(max_num_tokens, max_num_seqs) // tensor_ranks)


def expert_windows_bytes(model: ModelConfig, num_ranks: int, rows: int) -> int:
    """Return the bytes of `ExpertWindows` (native/ops.h) with room for `rows` rows of each rank."""
    return -(-num_ranks * (LINE + rows * sum(_row_bytes(model))) // LINE) * LINE


def expert_window_spans(model: ModelConfig, num_ranks: int, rows: int, num_first: int) -> Iterator[tuple[int, int]]:
    """Yield the spans [begin, end) of the windows that hold the first `num_first` rows of each rank."""
    begin = num_ranks * LINE
    yield 0, begin
    for size in _row_bytes(model):
        for _ in range(num_ranks):
            yield begin, begin + min(num_first, rows) * size
            begin += rows * size


def _row_bytes(model: ModelConfig) -> tuple[int, int, int, int]:
    """Return the bytes of a row in each of the arrays: the row, the results of its experts, their numbers, its adapter."""
    assert model.experts is not None, "a model without experts has no exchange windows"
    hidden, chosen = model.experts.latent_size or model.hidden_size, model.experts.num_chosen
    return 4 * hidden, 4 * chosen * hidden, 4 * chosen, 4
