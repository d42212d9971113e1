"""The op table: the functions that a model may call. One field per op; each backend fills them with its own functions.

A model is written once, straight-line, as `k.linear(...)`, `k.attention(...)`; the worker chooses the table. `R` below is the
number of rows of a step, padded to a multiple of the table's `row_tile`; padded rows hold token 0 at position 0 of the dummy
block, and their results are unused.

Every op is batch- and chunk-invariant: a row's bits depend only on that row and the keys it sees. The order of each reduction
depends on the operand's shape, never on the number of rows, their positions, the chunk or the thread.
`tests/ops/test_invariance.py` checks this for every table, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from ops.modules import (
    AttentionShape,
    ColumnRules,
    Convolution,
    DeltaRule,
    Embedding,
    Experts,
    Factor,
    GatedNorm,
    HeadLinear,
    HeadNorm,
    KvCache,
    LatentShape,
    LayerCache,
    LayerNorm,
    LayerState,
    Linear,
    Module,
    Norm,
    Rotary,
    Router,
    StateCache,
    StateSpaces,
    Tensor,
)
from ops.weight_format import Source, Store

ROW_TILE = 16  # queries of an attention tile, and the largest `OpTable.row_tile`
KEY_SPLIT = 64  # keys are reduced in splits of this many, counted from position 0
NUM_ROWS, NUM_SEQUENCES, NUM_LOGIT_ROWS, HAS_BOUNDS, NUM_TOKENS = range(5)  # contents of `Inputs.host_counts`


class AttentionMetadata(Protocol):
    """Rows of sequences, as attention reads them. The tensors have fixed addresses and full size; the counts say how much is in
    use. Made by `workers/engine/inputs.py`."""

    max_rows: int
    num_rows: int  # R, a multiple of the table's row_tile
    num_tokens: int  # without padding
    num_tiles: int  # at least 2
    tile_rows: int  # queries per attention tile: 1 if every sequence has one row, otherwise ROW_TILE
    num_key_splits: int  # covers the longest context of the step
    # of layers by `LayerCache.table`: int32 [max_num_seqs + 1, max_blocks]; the last is for padded rows and all zero
    block_tables: Sequence[Tensor]
    positions: Tensor  # int32 [max_rows]; of kept rows for tables that read tiles
    tile_slots: Tensor  # int32 [max_tiles]: batch slot of each tile
    tile_contexts: Tensor  # int32 [max_tiles]: keys of the tile's sequence, this step's included
    tile_row_ids: Tensor  # int32 [max_tiles * ROW_TILE]: row of each query of each tile
    row_queries: Tensor  # int32 [max_rows]: index of each row's query among those of the tiles
    sequence_slots: Tensor  # int32 [max_num_seqs]: batch slot of each sequence
    sequence_offsets: Tensor  # int32 [max_num_seqs + 1]: first row of each sequence, and the end of the last
    sequence_starts: Tensor  # int32 [max_num_seqs]: position of its first row
    context_lengths: Tensor  # int32 [max_num_seqs]: the position after its last row
    first_keys: Tensor  # int32 [max_rows]: the first and the last position that each row sees,
    last_keys: Tensor  # if HAS_BOUNDS is not zero; otherwise all up to its own
    host_counts: np.ndarray  # int32 [5]: NUM_ROWS, NUM_SEQUENCES, NUM_LOGIT_ROWS, HAS_BOUNDS, NUM_TOKENS; fixed address

    adapter_slots: Tensor  # int32 [max_rows]: adapter of each row, -1: none; only with adapters

    # vision-language models only
    feature_rows: Tensor  # int32 [max_rows]: place of each row's features, -1: none
    expert_sets: Tensor  # int32 [max_rows]: 1 for media and their markers, else 0
    features: (
        np.ndarray | None
    )  # [rows, columns] of the encoder arena at a fixed address: float32, or uint16 with the bits of bfloat16


class SequenceState(NamedTuple):
    """Use of a sequence's state in a step: columns of `Inputs.states`.

    A step reads the slot `read`, which covers the tokens before `position`, applies the first `sequence_starts - position` rows
    of its log, and then the sequence's rows. The state goes to `keep` before the row at `keep_at`, and to `write` after the
    first `num_certain` rows; rows after these are drafts, which go to the log of `write`. Slot 0 is not written; a `keep_at`
    after the certain rows is not reached. A step writes no slot that it reads, so it can be sent again."""

    read: int
    position: int
    write: int = 0
    keep: int = 0
    keep_at: int = 0
    num_certain: int = 0


class KeptRows(AttentionMetadata, Protocol):
    """Rows for which the last layer continues after storing keys and values; the hidden states of other rows are not needed."""

    row_ids: Tensor  # int32 [max_rows]: index among the step's rows


class Inputs(AttentionMetadata, Protocol):
    """Inputs of all rows of a step."""

    is_made_on_device: bool  # `begin` computes the tensors (`ops/step_layout.py`, InPlace); otherwise they are ready
    logit_row_ids: Tensor  # int32 [...]: kept rows that need logits
    token_ids: Tensor  # int32 [max_rows]
    same_inputs: Sequence[tuple[int, int]]  # tokens that are embedded as another one: both
    row_slots: Tensor  # int32 [max_rows]: batch slot of each row
    slot_mappings: Sequence[Tensor]  # of each block table, int32 [max_rows]: cache slot of each row, computed by `begin`

    # models with learned positions only
    position_rows: Tensor  # int32 [max_rows]: of `TypedPositions`

    # M-RoPE models only
    row_numbers: Tensor  # int32 [max_rows]: 0, 1, 2, ...
    row_cosines: Tensor  # float32 [max_rows, head_dim]: like those of a position in `Rotary`
    row_sines: Tensor

    # models with recurrent layers only: int32 [max_num_seqs + padded rows, 6], `SequenceState` of each sequence
    states: Tensor


class StepInputs(Inputs, Protocol):
    """Inputs of trunk steps, in which the last layer continues with some rows only."""

    @property
    def kept(self) -> KeptRows: ...


class Routing(msgspec.Struct, frozen=True):
    """Experts of each row, the best first, and the weights of their results."""

    ids: Tensor  # int32 [R, chosen]
    weights: Tensor  # float32 [R, chosen]
    adapter_slots: Tensor = None  # int32 [max_rows] as in AttentionMetadata, for experts that have `adapters`


class DeviceSampler(msgspec.Struct, frozen=True):
    """Sampling on the device, with inputs computed there (`Inputs.is_made_on_device`). `run`: the step, logits float32 [m,
    vocab] of `inputs.logit_row_ids` -> int32 [3, m]: tokens, the bits of their log-probabilities (float32, of the raw logits),
    ranks; or [1, m], only tokens, if it `is_greedy`, for rows without temperature. For rows with the flag DRAWN, the next token
    and length of their slot are written for the next step. Each row's token equals that of the native sampler, in any batch."""

    run: Callable[[StepInputs, Tensor], Tensor]
    is_greedy: bool


class OpTable(msgspec.Struct, frozen=True):
    """The ops of one backend."""

    name: str
    max_head_dim: int | None  # maximum elements of a head or latent that attention supports; None: any number
    row_tile: int  # rows of a step, and row ids of `take_rows`, come in multiples of this; a divisor of ROW_TILE

    # packs a module's weights into the store, in the backend's layout and the module's format, and sets them on the module.
    # Sources: "weight" [out, in] and "bias" of a Linear; "weight" of an Embedding or PositionTable [rows, width], Norm or
    # HeadLinear (the whole of the checkpoint's linear); "weight" and "bias" of a LayerNorm; "queries", "keys" of a HeadNorm;
    # "cosines", "sines", "partners" and perhaps "query_factors" of a Rotary; "weight", "bias", "correction" and "scales" of a
    # Router; "gate_up.0", "down.0", "gate_up.1", ... of Experts, and their biases "gate_up.0.bias", ...; "weight" of Sinks,
    # Factor and GatedNorm; "rules" of ColumnRules; "weight" of a Convolution [channels, 1, kernel] and "bias"; "A_log" and
    # "dt_bias" of a DeltaRule; the same and "D" of StateSpaces
    pack: Callable[[Module, Mapping[str, Source], Store], None]

    # describes the layout of `pack` on this machine in full; packed weights with another description are unusable. None: `pack`
    # does not use the store, and everything becomes float32
    layout: Callable[[], str] | None
    # packed modules as bytes and records, for tables that cannot say what `pack` needs before they pack: `Stored` of
    # `ops/cuda/stored.py`
    stored: Any
    integer_kinds: tuple[str, ...]  # integer formats that `pack` keeps as stored in a checkpoint; others become floats

    # host memory of a layer's keys or values, uint8 [num_blocks + 1, bytes of a block], and the block size -> the same memory
    # as the table's ops need it
    cache_view: Callable[[np.ndarray, int], np.ndarray]
    clear_block: Callable[[KvCache, int], None]  # zeroes this block in every layer
    drawing: DeviceSampler | None  # None: the host samples from the logits
    # inputs computed on the device, their columns of draft layers, sizes -> `LayerMemory` of `ops/layer_rows.py`; None: the
    # host computes the inputs
    layer_memory: Callable[..., Any] | None
    # replacements of ops, by name, that never read numbers on the host: for graphs, and for few rows on devices. The same bits
    sync_free_ops: Mapping[str, Callable[..., Any]]

    # a step's metadata: fills `inputs.slot_mappings`; returns what `attention` needs of this step
    begin: Callable[[Inputs, KvCache], Any]

    embedding: Callable[[Inputs, Embedding], Tensor]  # -> [R, width]: by token ids, or as `TypedPositions` defines
    # the step, x [R, width], number -> x, which may be changed in place: the columns [number * width, (number + 1) * width) of
    # a row's features replace the row if the number is 0, otherwise are added to it
    take_features: Callable[[Any, Tensor, int], Tensor]
    linear: Callable[[Tensor, Linear], Tensor]  # [R, in] -> [R, out]
    # a step or its inputs, y [R, out] from `linear` of x [R, in] -> y plus the term of each row's adapter: (x A^T) (B^T scale).
    # May be in place; rows without an adapter keep their bits. For linears that have `adapters`
    adapt: Callable[[Any, Tensor, Tensor, Linear], Tensor]
    rms_norm: Callable[[Tensor, Norm], Tensor]  # [R, width] -> [R, width]
    add_rms_norm: Callable[[Tensor, Tensor, Norm], tuple[Tensor, Tensor]]  # h, residual -> norm(h + residual), h + residual
    rotary_angles: Callable[[Inputs, Rotary], Any]  # per row, for `rotate_and_store`
    # [R, q + k + v] -> queries [R, q]: normalizes heads (where the model does), rotates, writes keys and values at
    # slot_mapping; of a shape without keys [R, q] -> queries [R, q]
    rotate_and_store: Callable[[Inputs, Tensor, Tensor, HeadNorm | None, AttentionShape, LayerCache], Tensor]
    # [R, q + k + v], whole in each rank -> the same for `rotate_and_store`: all queries of a row normalized as one vector, and
    # all keys
    normalize_wide: Callable[[Tensor, Norm, Norm, AttentionShape], Tensor]
    attention: Callable[[Any, Tensor, AttentionShape, LayerCache], Tensor]  # step, queries [R, q] -> [R, q]
    # the step, queries [R, q] and other tensors [R, n] -> the same for only the step's kept rows
    keep_rows: Callable[..., Any]
    # gate | up [R, 2 n], activation's name, a GateClamp or None (the default) -> [R, n]
    activate_and_multiply: Callable[..., Tensor]
    scale_and_add: Callable[[Tensor, float, Tensor | None], Tensor]  # x [R, n], factor, y [R, n] or None -> x * factor + y
    multiply: Callable[[Tensor, Tensor | Factor], Tensor]  # x [R, n], factors [R, n] or [R, 1], or one factor -> the product
    query_factors: Callable[[Inputs, Rotary], Tensor]  # of a Rotary that has them -> [R, 1], by position
    take_rows: Callable[[Tensor, Tensor], Tensor]  # [R, n], row ids [m] -> [m, n]
    # with several ranks, each has some columns of a result of linear, attention, activation or experts: returns x with all
    # columns, readable until the next gather. If this rank has all columns, returns x
    all_gather: Callable[[Tensor], Tensor]
    # the step, [R, hidden] -> each row's experts; if the router is for one set of rows, other rows have -1 and weights 0. In
    # the native table so have padded rows, which then cost nothing and are not counted
    route: Callable[[Any, Tensor, Router], Routing]
    # each row's experts, number -> the choice of that number alone, with the weight 1, and the weight that it had [R, 1]
    choose: Callable[[Routing, int], tuple[Routing, Tensor]]
    # x [R, hidden], each row's experts, activation's name, another tensor [R, hidden] or None -> the sum of the experts'
    # results, each times its weight, in the order of the row's choices, and then the other [R, hidden]. If they have
    # `adapters`, the terms of each row's adapter are added to the results of an expert's linears, as `adapt` does
    experts: Callable[[Tensor, Routing, Experts, str, Tensor | None], Tensor]

    # Multi-head latent attention (DeepSeek-V2, 2024), absorbed for every row, so prefill and decode round alike.
    # queries [R, heads * (plain + rotary)], compressed [R, latent + rotary] -> queries with their rotary parts rotated;
    # writes the normalized latent and the rotated key at slot_mapping
    store_latent: Callable[[Inputs, Tensor, Tensor, Tensor, Norm, LatentShape, LayerCache], Tensor]
    # the step, absorbed queries [R, heads * latent], queries as `store_latent` gives them -> [R, heads * latent]
    latent_attention: Callable[[Any, Tensor, Tensor, LatentShape, LayerCache], Tensor]
    # [R, heads * n] -> [R, heads * out]: the first num_inputs of the n values of a head, times the head's weights
    head_linear: Callable[[Tensor, HeadLinear], Tensor]

    # Ops of encoders.
    layer_norm: Callable[[Tensor, LayerNorm], Tensor]  # as rms_norm
    add_layer_norm: Callable[[Tensor, Tensor, LayerNorm], tuple[Tensor, Tensor]]  # as add_rms_norm
    activate: Callable[[Tensor, str], Tensor]  # [R, n], activation's name -> [R, n]
    # [R, n], how many, and the place of the result's number of rows (int32 [1]) -> consecutive rows joined into one, in the
    # same memory
    join_rows: Callable[[Tensor, int, np.ndarray], Tensor]
    mean_rows: Callable[[Tensor, int, np.ndarray], Tensor]  # as join_rows, but the mean of the rows, [R / how many, n]
    # tensors [R, n] of the widths of the rules -> side by side, each column by its rule. One tensor may have some columns
    adjust_columns: Callable[[Sequence[Tensor], ColumnRules], Tensor]

    # Ops of recurrent layers: a step, tensors, module, the layer's places in a slot, the state arena. A state is computed token
    # by token in float32, in the order of positions, so results and states have the same bits for any chunks.
    convolve: Callable[[Any, Tensor, Convolution, LayerState, StateCache], Tensor]  # x [R, n] -> [R, channels]
    # queries | keys | values [R, n] after `convolve`, a [R, heads or heads * key_dim], b [R, heads] -> [R, heads * value_dim]
    delta_rule: Callable[[Any, Tensor, Tensor, Tensor, DeltaRule, LayerState, StateCache], Tensor]
    # x | B | C [R, n] after `convolve`, dt [R, heads] -> [R, heads * head_dim]
    state_space: Callable[[Any, Tensor, Tensor, StateSpaces, LayerState, StateCache], Tensor]
    # x [R, width], gate [R, n] or None -> [R, width]
    gated_norm: Callable[[Tensor, Tensor | None, GatedNorm], Tensor]

    def sync_free(self) -> OpTable:
        """Return the table for graphs and few rows, in which no op waits for the device."""
        return msgspec.structs.replace(self, **self.sync_free_ops)
