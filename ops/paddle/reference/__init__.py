"""Reference backend: every op in plain Paddle, float32. Runs on any Paddle device and is the reference of every test.

Used by the worker if no native table fits the device. A row's bits depend only on that row, for these reasons:

- Rows always come in multiples of ROW_TILE. Paddle's elementwise kernels process the end of an array that is not a multiple of
  the vector width with scalar code, which rounds `exp` and `sqrt` differently; full tiles avoid that.
- A BLAS chooses its order of summation by the shape of a product and by the position of a row in it. So in a linear every row
  is a separate product, [1, in] x [in, OUTPUT_CHUNK], in one batch with the other rows and chunks.
- In attention each query has its own products [group, head_dim] x [head_dim, KEY_SPLIT] and [group, KEY_SPLIT] x [KEY_SPLIT,
  head_dim], in any tile; splits are counted from position 0 and added in order. The maximum is exact in any order, and a split
  with only masked keys adds exact zeros, so it can be omitted.
- Products read and write whole lines of LANES elements: other widths are padded with zeros, which change no sum. A BLAS treats
  operands that begin within a line with other code.
- Paddle joins the rows of a batched product into one when the other operand is not batched; hence at least two chunks of
  outputs in a linear, and at least two tiles in attention (`Inputs.num_tiles`).
- With several ranks (`rank_group.py`), each computes whole chunks and products of whole groups of query heads, and keeps its
  own columns and heads, so each product is the same as on one rank.
"""

from __future__ import annotations

from ops.paddle.progress import reporting
from ops.paddle.reference.attention_ops import (
    attention,
    cache_view,
    clear_block,
    keep_rows,
    latent_attention,
    store_latent,
    take_features,
)
from ops.paddle.reference.chunks import Cut, own_columns, pack, stacked_biases
from ops.paddle.reference.expert_ops import (
    add_choices,
    choose,
    expert_products,
    experts,
    route,
    rows_of_choices,
    slots_of_choices,
    sync_free_experts,
    sync_free_products,
)
from ops.paddle.reference.layer_rows import PaddleLayerMemory
from ops.paddle.reference.linears import (
    activate,
    activate_and_multiply,
    adapt,
    add_layer_norm,
    add_rms_norm,
    adjust_columns,
    embedding,
    head_linear,
    join_rows,
    layer_norm,
    linear,
    mean_rows,
    multiply,
    rms_norm,
    scale_and_add,
    take_rows,
)
from ops.paddle.reference.recurrence import convolve, delta_rule, gated_norm, state_space
from ops.paddle.reference.rotation import Angles, normalize_wide, query_factors, rotary_angles, rotate_and_store
from ops.paddle.reference.sampling import draw_largest
from ops.paddle.reference.step import begin
from ops.table import ROW_TILE, DeviceSampler, OpTable

__all__ = [
    "TABLE",
    "Angles",
    "Cut",
    "activate_and_multiply",
    "add_choices",
    "attention",
    "begin",
    "expert_products",
    "experts",
    "own_columns",
    "pack",
    "rows_of_choices",
    "slots_of_choices",
    "stacked_biases",
    "sync_free_experts",
    "sync_free_products",
    "take_features",
]

TABLE = OpTable(
    name="reference",
    max_head_dim=None,
    row_tile=ROW_TILE,
    pack=pack,
    layout=None,
    stored=None,
    integer_kinds=(),
    cache_view=cache_view,
    clear_block=clear_block,
    drawing=DeviceSampler(draw_largest, is_greedy=True),
    layer_memory=PaddleLayerMemory,
    sync_free_ops={"experts": sync_free_experts},
    begin=reporting(begin),
    embedding=embedding,
    take_features=take_features,
    linear=reporting(linear),
    adapt=adapt,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotary_angles=rotary_angles,
    rotate_and_store=reporting(rotate_and_store),
    normalize_wide=normalize_wide,
    attention=reporting(attention),
    keep_rows=keep_rows,
    activate_and_multiply=reporting(activate_and_multiply),
    scale_and_add=scale_and_add,
    multiply=multiply,
    query_factors=query_factors,
    take_rows=take_rows,
    all_gather=lambda x: x,  # single rank
    route=reporting(route),
    choose=choose,
    experts=reporting(experts),
    store_latent=reporting(store_latent),
    latent_attention=reporting(latent_attention),
    head_linear=reporting(head_linear),
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
    activate=activate,
    join_rows=join_rows,
    mean_rows=mean_rows,
    adjust_columns=adjust_columns,
    convolve=convolve,
    delta_rule=delta_rule,
    state_space=state_space,
    gated_norm=gated_norm,
)
