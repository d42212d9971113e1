"""Number of KV blocks that fit a device beside the rest of a rank. Pure.

Used by `resolve.py` if Paddle or the driver reports the device memory; a requested size is only checked. This is a safe
estimate for the reference ops (`ops/paddle/reference/`, everything float32); the worker checks it with the largest step when
it has loaded the weights.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from engine.checkpoint.comm_spec import comm_bytes, expert_rows, expert_windows_bytes, max_logit_rows, max_rows
from engine.checkpoint.families import FAMILIES
from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.errors import TooLargeError
from shm.rank_group import buffers_at
from shm.sizes import size_text

_BYTES = 4  # of an integer, and of a value in float32
_MAX_SCORES = 1 << 23  # in one attention pass, with this many copies
_COPIES_OF_SCORES = 4
_MAX_GATHERED = 1 << 24  # gathered expert weights for a group of rows, or of one expert
_ROWS_OF_HIDDEN = 8  # buffers as wide as a hidden state that exist at once, per row of a step
_ROWS_OF_INNER = 3
_MASK_BYTES = 16  # per row and key of a step: comparisons and their results
_KEY_SPLIT = 64
_MIB = 1 << 20
_ROUNDED_BYTES = {"wint8": 1, "wint4": 0.5 + _BYTES / 32}  # per value: a scale covers at least 32 of them


class CardNeeds(msgspec.Struct, frozen=True):
    """Device memory of a rank besides the KV cache, in bytes."""

    weights: int
    inputs: int
    step: int  # of the largest step
    graphs: int  # of the largest size: the others fit in its memory
    exchange: int = 0  # with other ranks
    adapters: int = 0  # but those of experts, which stay on the host

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))

    @property
    def text(self) -> str:
        parts = msgspec.structs.asdict(self).items()
        return ", ".join(f"{name} {size_text(size)}" for name, size in parts if size or name not in ("exchange", "adapters"))


def card_needs(
    model: ModelConfig,
    num_weights: int,
    values: dict[str, Any],
    max_model_len: int,
    largest: int,
    num_tables: int = 1,
    value_bytes: int = _BYTES,
    adapter_bytes: int = 0,
) -> CardNeeds:
    """Return the needs of one rank. `values`: of the options. `largest`: rows of the largest captured step, 0 if none is
    captured. `num_tables`: block tables of a sequence. `value_bytes`: of weights that are not rounded, and of hidden states.
    `adapter_bytes`: of all slots."""
    num_drafts: int = values["speculative_config"].max_drafts
    seats: int = values["max_num_seqs"]
    rows = max_rows(values["max_num_batched_tokens"], seats)
    per_slot = max_model_len + 2 * (1 + num_drafts) + num_tables * math.ceil(max_model_len / values["block_size"])
    inputs = _BYTES * (seats + 1) * per_slot + 64 * _BYTES * rows
    keys = -(-max_model_len // _KEY_SPLIT) * _KEY_SPLIT
    logits = 2 * _BYTES * model.vocab_size * max_logit_rows(rows, seats, num_drafts)

    tensor_ranks, replicas = values["tensor_parallel_size"], values["data_parallel_size"]
    shares_experts = values["enable_expert_parallel"] and model.experts is not None

    def step_of(num_rows: int) -> int:
        inner = _inner(model) * (replicas if shares_experts else 1)  # a rank may get all rows
        width = _ROWS_OF_HIDDEN * model.hidden_size + _ROWS_OF_INNER * inner
        in_attention = min(num_rows * keys * model.num_attention_heads, _MAX_SCORES) * _COPIES_OF_SCORES * _BYTES
        return num_rows * (value_bytes * width + _MASK_BYTES * keys) + in_attention + _gathered_bytes(model) + logits

    weights = 0
    if num_weights:
        held = _held(model, num_weights, tensor_ranks, shares_experts=shares_experts)
        weights = held.bytes(values["quantization"], value_bytes)
    sizes = values["max_num_batched_tokens"], seats
    exchange = max(comm_bytes(model, tensor_ranks, tensor_ranks, *sizes, False, num_drafts) - buffers_at(tensor_ranks), 0)
    if shares_experts:
        exchange += expert_windows_bytes(model, tensor_ranks, expert_rows(tensor_ranks, *sizes))
    return CardNeeds(weights, inputs, step_of(rows), step_of(largest) if largest else 0, exchange, adapter_bytes)


class _Held(msgspec.Struct, frozen=True):
    """Numbers of weights that a rank holds."""

    embedding: int
    head: float
    others: float

    def bytes(self, quantization: str, value_bytes: int) -> int:
        """Return their bytes. Embeddings are floats, heads have at least 8 bits."""
        of_value = _ROUNDED_BYTES.get(quantization, value_bytes)
        return math.ceil(value_bytes * self.embedding + max(of_value, 1) * self.head + of_value * self.others)


def _held(model: ModelConfig, num_weights: int, tensor_ranks: int, *, shares_experts: bool) -> _Held:
    """Return what a rank holds of a checkpoint of `num_weights`. The head is counted as its own matrix, even if the checkpoint
    shares it. Tensor ranks divide the outputs of the head and of other matrices (`workers/rank_group/share.py`)."""
    embedding = model.vocab_size * model.hidden_size
    others = max(num_weights - embedding * (1 if model.tie_word_embeddings else 2), 0)
    whole = min(_undivided(model, tensor_ranks, shares_experts=shares_experts), others)
    return _Held(embedding, embedding / tensor_ranks, whole + (others - whole) / tensor_ranks)


def _undivided(model: ModelConfig, tensor_ranks: int, *, shares_experts: bool) -> float:
    """Return the number of weights, apart from the embedding, that each tensor rank holds: encoders, routers, experts that the
    replicas share, projections of models that normalize all queries as one, and KV heads that several ranks need."""
    hidden, found = model.hidden_size, 0.0
    if (vision := model.vision) is not None:
        merged = vision.hidden_size * vision.spatial_merge_size**2
        of_layer = 2 * vision.head_dim * (vision.num_heads + vision.num_kv_heads) + 3 * vision.intermediate_size
        found += vision.depth * vision.hidden_size * of_layer + merged * (merged + vision.out_hidden_size)
    if (experts := model.experts) is not None:
        of_expert = hidden * (1 + 3 * experts.intermediate_size * shares_experts)
        found += len(experts.sparse_layers) * experts.num_experts * of_expert
    if model.latents is None:
        is_wide = FAMILIES[model.architecture].has_wide_norm
        for shape in map(model.layer_shape, range(model.num_layers)):
            again = max(0, tensor_ranks - shape.num_kv_heads) / max(1, tensor_ranks - 1)  # of a KV head, beside a rank's part
            num_heads = model.num_attention_heads + 2 * shape.num_kv_heads if is_wide else 2 * again
            found += hidden * shape.head_dim * num_heads
    return found


def card_blocks(card_bytes: int, utilization: float, needs: CardNeeds, block_bytes: int) -> int:
    """Return the number of blocks that fit, without the dummy block. Raises TooLargeError if not even one fits."""
    num_blocks = int((card_bytes * utilization - needs.total) // block_bytes) - 1
    if num_blocks < 1:
        raise TooLargeError(
            f"--gpu-memory-utilization {utilization:g} of {size_text(card_bytes)} GPU memory leaves no room for a "
            f"KV cache: {needs.text}, and {size_text(2 * block_bytes)} for two blocks; raise it, lower "
            "--max-num-batched-tokens, --max-num-seqs or --max-model-len, or use a larger GPU"
        )
    return num_blocks


def check_card(card_bytes: int, needs: CardNeeds, cache_bytes: int) -> None:
    """Raise TooLargeError if a KV cache of the requested size does not fit."""
    total = needs.total + cache_bytes
    if total > card_bytes:
        raise TooLargeError(
            f"a rank needs {size_text(total)} of GPU memory (KV cache {size_text(cache_bytes)}, {needs.text}), but "
            f"{size_text(card_bytes)} are there; lower --num-kv-blocks or --kv-cache-memory, --max-num-batched-tokens, "
            "--max-num-seqs or --max-model-len, or use a larger GPU; --no-check-memory starts it anyway"
        )


def card_shortage(
    card_bytes: int, values: dict[str, Any], model: ModelConfig, num_weights: int, max_model_len: int, spec: KVCacheSpec
) -> str:
    """Return what memory the device lacks; empty if it has enough, or its memory is unknown (0)."""
    if not card_bytes:
        return ""
    needs = card_needs(model, num_weights, values, max_model_len, 0, spec.num_tables)
    try:
        card_blocks(card_bytes, values["gpu_memory_utilization"], needs, spec.bytes_per_block)
    except TooLargeError as error:
        return str(error)
    return ""


def _inner(model: ModelConfig) -> int:
    """Return the widest row between two products; for experts, of all chosen ones together."""
    experts = model.experts
    chosen = 0 if experts is None else experts.num_chosen * max(experts.intermediate_size, model.hidden_size)
    return max(model.largest_intermediate_size, chosen)


def _gathered_bytes(model: ModelConfig) -> int:
    experts = model.experts
    if experts is None:
        return 0
    largest = 2 * experts.intermediate_size * model.hidden_size
    return _BYTES * max(min(_MAX_GATHERED, experts.num_experts * largest), largest)
