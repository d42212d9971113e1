"""Holders of weights and caches for the ops: small, named, filled by the loader, opaque to the models.

Used by the models (which declare them), the loader (which fills them) and the op table (which reads them). The type of `weight`
(a Paddle tensor, a packed buffer) is known only to the op table that packed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from ops.weight_format import FLOAT32, WeightFormat

Tensor = Any  # a backend's tensor: Paddle's in the reference; opaque to models and other backends
# numbered as `Activation` in cpu/native/kernels.h and in cuda/elements.cu
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh", "sigmoid")
Columns = tuple[tuple[int, int], ...]  # [begin, end) of a rank's columns of a matrix; empty: all


class AdaptedPart(msgspec.Struct, frozen=True):
    """Outputs of one of several fused linears that an adapter can change."""

    first: int  # its span among all outputs
    num_outputs: int
    index: int  # column in the table of ranks
    a: int  # offset of its first matrix in a slot, in floats
    b: int


class Adapters(msgspec.Struct, frozen=True):
    """View of the adapter arena for one linear; `engine/checkpoint/adapters/layout.py` defines the layout. Contents change only
    between steps, in slots without rows."""

    parts: tuple[AdaptedPart, ...]
    slots: Tensor  # float32 [slots, floats of a slot]
    ranks: Tensor  # int32 [slots, modules]


class ExpertAdapters(msgspec.Struct, frozen=True):
    """View of the adapter arena for the experts of a layer. Parts are those of the first expert; `index` and offsets of the
    next one are larger by the steps."""

    gate_up: tuple[AdaptedPart, ...]
    down: tuple[AdaptedPart, ...]
    index_step: int
    float_step: int
    slots: np.ndarray  # as in Adapters
    ranks: Tensor

    def of(self, part: str, expert: int) -> Adapters:
        """Return the view for one expert, of the linear that is its `gate_up` or `down`."""
        parts: tuple[AdaptedPart, ...] = getattr(self, part)
        moved = [
            AdaptedPart(
                each.first,
                each.num_outputs,
                each.index + expert * self.index_step,
                each.a + expert * self.float_step,
                each.b + expert * self.float_step,
            )
            for each in parts
        ]
        return Adapters(tuple(moved), self.slots, self.ranks)


class Linear(msgspec.Struct):
    """y = x W (+ b). The tensors `names` of the checkpoint, [out, in] each, are concatenated along the outputs."""

    names: tuple[str, ...]
    num_inputs: int
    num_outputs: tuple[int, ...]  # of each name
    has_bias: bool = False
    format: WeightFormat = FLOAT32
    columns: Columns = ()  # outputs that this rank computes
    is_looked_up: bool = False  # an embedding looks up its outputs as rows
    # float32 [in]: what a squared error of rounding costs at each input; None: unknown
    importances: np.ndarray | None = None
    adapters: Adapters | None = None  # None: no adapters
    has_float_outputs: bool = False  # they are float32 whatever the type of activations is
    bias_name: str = ""  # if it is not stored next to the weight, as for a head with tied embeddings
    weight: Tensor = None
    bias: Tensor = None

    @property
    def name(self) -> str:
        return "+".join(self.names)

    @property
    def bias_names(self) -> list[str]:
        """Names of the bias tensors, in the order of the outputs."""
        if not self.has_bias:
            return []
        return [self.bias_name] if self.bias_name else [f"{name}.bias" for name in self.names]

    @property
    def width(self) -> int:
        return sum(self.num_outputs)


class LinearPart(Linear):
    """Part of a stored linear: inputs from `first_input` on of `stored_inputs`, and outputs from `first_output` on of
    `stored_outputs`."""

    first_input: int = 0
    stored_inputs: int = 0
    first_output: int = 0
    stored_outputs: int = 0

    @property
    def name(self) -> str:
        return f"{self.names[0]}.{self.first_input or self.first_output}"


class HeadLinear(msgspec.Struct):
    """y = x W separately for each head: [num_heads, in] -> [num_heads, out], in floats. W is a part of the head's rows in the
    linear `name` of the checkpoint, [num_heads * rows_of_head, columns]: `rows`, as [out, in], or [in, out] if `is_turned`."""

    name: str
    num_heads: int
    rows_of_head: int
    rows: range
    num_columns: int
    is_turned: bool
    format: WeightFormat = FLOAT32
    own: range | None = None  # heads that this rank computes; None: all
    weight: Tensor = None

    @property
    def heads(self) -> range:
        return range(self.num_heads) if self.own is None else self.own

    @property
    def num_inputs(self) -> int:
        return len(self.rows) if self.is_turned else self.num_columns

    @property
    def num_outputs(self) -> int:
        return self.num_columns if self.is_turned else len(self.rows)

    def weights_of_heads(self, weight: np.ndarray) -> np.ndarray:
        """Return the checkpoint's `weight` as a view [num_heads, out, in]."""
        found = weight.reshape(self.num_heads, self.rows_of_head, self.num_columns)[:, self.rows.start : self.rows.stop]
        return found.swapaxes(1, 2) if self.is_turned else found


class Embedding(msgspec.Struct):
    """One row of `width` per token."""

    name: str
    num_rows: int
    width: int
    format: WeightFormat = FLOAT32
    tied: Linear | None = None  # the head with the same weights: a backend may keep one copy. Packed first
    weight: Tensor = None


class EmbeddingPart(Embedding):
    """Columns from `first_column` on of the stored table `stored_name` [num_rows, stored_width]."""

    stored_name: str = ""
    first_column: int = 0
    stored_width: int = 0


class TypedPositions(Embedding):
    """Learned position embeddings of several token types, added up when packed: one float32 row for each position of each type.
    Stored as `name`, with unused first rows, and `types_name`. Looked up by `Inputs.position_rows`."""

    types_name: str = ""
    num_types: int = 1
    first_row: int = 0
    num_stored_rows: int = 0

    def added(self, positions: np.ndarray, types: np.ndarray) -> np.ndarray:
        """Return float32 [types * positions, width] from the stored tensors."""
        used = positions[self.first_row : self.first_row + self.num_rows // self.num_types]
        rows: np.ndarray = (types[:, None] + used).reshape(-1, self.width)
        return rows


class Norm(msgspec.Struct):
    """RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019). With a `head_dim`, the same for each head of
    so many numbers, minus their mean (only for `normalize_wide`)."""

    name: str
    width: int
    epsilon: float
    offset: float = 0.0  # added to the stored weight
    has_weight: bool = True  # False: it is 1
    head_dim: int = 0  # 0: x is normalized as one
    weight: Tensor = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.width // self.head_dim, self.head_dim) if self.head_dim else (self.width,)


class LayerNorm(msgspec.Struct):
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias (Ba et al. 2016); without a bias it is 0."""

    name: str
    width: int
    epsilon: float
    has_bias: bool = True
    weight: Tensor = None
    bias: Tensor = None


class PatchLinear(Linear):
    """First layer of an encoder, from the pixels of a patch: 0 to 255, [frames, patch, patch, red green blue]. Scale and shift
    of pixels are folded into the weights, which are float32 in every precision. The frames of a picture are identical and
    folded into one."""

    stored_shape: tuple[int, ...] = ()  # [out, 3, ..., patch, patch], or the same with fewer axes
    frames: int = 1  # of the patches
    stored_frames: int = 1
    factor: float = 1.0  # pixels become (pixel * factor - mean) / deviation
    means: tuple[float, ...] = (0.0, 0.0, 0.0)
    deviations: tuple[float, ...] = (1.0, 1.0, 1.0)
    has_stored_bias: bool = False
    are_channels_last: bool = False  # as stored: [out, patch, patch, 3]

    @property
    def name(self) -> str:
        """Name of the packed weights, which pictures and videos keep separately."""
        return f"{self.names[0]}.{self.frames}"

    def folded(self, weight: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return [out, frames * patch * patch * 3] and [out] from the stored weight and bias."""
        side = round((weight.size / (len(weight) * 3 * self.stored_frames)) ** 0.5)
        if self.are_channels_last:
            weight = weight.reshape(len(weight), -1, 3).swapaxes(1, 2)
        of_pixels = weight.reshape(len(weight), 3, self.stored_frames, side, side).astype(np.float64)
        if self.frames < self.stored_frames:
            of_pixels = of_pixels.sum(axis=2, keepdims=True)
        of_channels = of_pixels / np.array(self.deviations)[:, None, None, None]
        shift = of_channels.sum(axis=(2, 3, 4)) @ np.array(self.means)
        flat = (of_channels * self.factor).transpose(0, 2, 3, 4, 1).reshape(len(weight), -1)
        return flat.astype(np.float32), ((0 if bias is None else bias) - shift).astype(np.float32)


class PositionTable(msgspec.Struct):
    """A learned row for each position in a square of `side` positions, interpolated to any picture. `has_aligned_corners`: its
    corners match the picture's corner patches; otherwise its edges match the picture's edges."""

    name: str
    side: int
    width: int
    has_aligned_corners: bool = False
    values: np.ndarray | None = None  # float32, of `shape`: read when a call is prepared, not by ops

    @property
    def shape(self) -> tuple[int, ...]:
        return self.side * self.side, self.width


class AxisPositionTables(PositionTable):
    """A learned row for each of `side` columns of patches, and one for each row of patches, which are added."""

    @property
    def shape(self) -> tuple[int, ...]:
        return 2, self.side, self.width


class ColumnRules(msgspec.Struct):
    """A rule for each column of some tensors side by side: x * factor + shift, between a lowest and a highest value."""

    name: str
    widths: tuple[int, ...]  # columns of each tensor
    weight: Tensor = None  # float32 [4, width]: factors, shifts, lowest and highest values

    @property
    def width(self) -> int:
        return sum(self.widths)


class Factors(ColumnRules):
    """Constant factors of spans of columns, one after another."""

    spans: tuple[tuple[int, float], ...] = ()  # columns, factor

    def rules(self) -> np.ndarray:
        rules = np.zeros((4, self.width), np.float32)
        rules[0] = np.concatenate([np.full(count, factor) for count, factor in self.spans])
        rules[2:] = [[-np.inf], [np.inf]]
        return rules


class Limits(ColumnRules):
    """Limits of the `side` of linears that were trained with them, one for each name."""

    names: tuple[str, ...] = ()
    side: Literal["input", "output"] = "input"

    @property
    def stored_names(self) -> list[tuple[str, str]]:
        return [(f"{name}.{self.side}_min", f"{name}.{self.side}_max") for name in self.names]

    def rules(self, limits: Sequence[tuple[float, float]]) -> np.ndarray:
        """Return the rules, from the limits of each name."""
        columns = np.repeat(np.array(limits, np.float32), self.widths, axis=0).T
        return np.concatenate([np.ones((1, self.width)), np.zeros((1, self.width)), columns]).astype(np.float32)


class Standardization(ColumnRules):
    """(x * factor - stored bias) * stored scale."""

    factor: float = 1.0

    @property
    def stored_names(self) -> tuple[str, str]:
        return f"{self.name}_bias", f"{self.name}_scale"

    def rules(self, bias: np.ndarray, scale: np.ndarray) -> np.ndarray:
        limits = np.full((2, self.width), np.inf)
        limits[0] *= -1
        return np.stack([scale * self.factor, -bias * scale, *limits]).astype(np.float32)


class HeadNorm(msgspec.Struct):
    """RMSNorm of each query and key head, with one weight for all queries and one for all keys. Without weights
    they are 1. `has_values`: values are normalized too, without a weight."""

    query_name: str
    key_name: str
    num_heads: int
    num_kv_heads: int
    width: int  # of a head
    epsilon: float
    offset: float = 0.0  # added to the stored weights
    is_after_rotation: bool = False
    has_weight: bool = True
    has_values: bool = False
    weight: Tensor = None


class Rotary(msgspec.Struct):
    """x -> x * cosines[position] + x[partners] * sines[position] for a head x: float32 [max_model_len, head_dim] each, and
    int32 [head_dim]. Elements that are not rotated have cosine 1 and sine 0; the minus of a rotation is in the sines. If
    positions have three numbers, each row of a step has its own cosines and sines (`Inputs.row_cosines`)."""

    head_dim: int
    is_by_row: bool = False
    is_constant: bool = False  # nothing is rotated: cosines are 1 and sines 0, and a backend may keep one row of each
    query_factors: Tensor = None  # float32 [max_model_len, 1], of queries by position; None: queries stay
    cosines: Tensor = None
    sines: Tensor = None
    partners: Tensor = None


class RoutingRule(msgspec.Struct, frozen=True):
    """Rule that selects a row's experts and their weights from scores. Scores are the softmax of the logits, or the sigmoid of
    each. Experts are in `num_groups` equal groups of neighbours; the score of a group is the sum of its `num_best` best experts
    (1 or 2), and only experts of the best `num_chosen_groups` groups are selected. Ties go to the first. Weights are scores; if
    normalized, divided by max(their sum + added_to_sum, smallest_sum); then times `factor`."""

    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = False
    added_to_sum: float = 0.0
    smallest_sum: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_best: int = 2


class Router(msgspec.Struct):
    """Scores a row's experts. `linear` is float32 in every precision. A correction, float32 [experts], is added to scores for
    the selection of experts, not for their weights. With a `set`, only rows of that set are scored
    (`AttentionMetadata.expert_sets`), and the correction is that row of the tensor."""

    linear: Linear  # [hidden] -> [experts]
    rule: RoutingRule
    correction_name: str = ""  # name of the tensor; empty: none
    correction_shape: tuple[int, ...] = ()  # stored shape
    correction: Tensor = None
    scales_name: str = ""  # of factors of each expert's weight, float32 [experts]; empty: none
    scales: Tensor = None
    set: int | None = None
    weight_name: str = ""  # name of a tensor [hidden, experts]; empty: that of `linear`, [experts, hidden]

    @property
    def num_experts(self) -> int:
        return self.linear.width


class GateClamp(msgspec.Struct, frozen=True):
    """Gate of gpt-oss in place of activation(gate) * up, with gate limited from above and up from both sides:
    (up + 1) * gate * sigmoid(alpha * gate)."""

    alpha: float
    limit: float


class Experts(msgspec.Struct):
    """down(activation(gate) * up), or down(activation(up)), for many experts of one shape and format. Each part of the format
    is one array with the matrices of all experts one after another, and so are the biases if the linears have any."""

    name: str
    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    clamp: GateClamp | None = None  # None: the activation is that of the op's argument
    weight: Tensor = None
    owners: Tensor = None  # with several ranks: int32 [experts, 1 + ranks] (engine/parallel/placement.py); None: one rank
    is_local: bool = False  # each rank computes all that it needs, even if other experts are shared
    counts: Tensor = None  # uint64 [experts]: total rows of this rank sent to each; None: not counted
    adapters: ExpertAdapters | None = None  # None: no adapters

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)

    @property
    def num_inputs(self) -> int:
        return self.gate_up[0].num_inputs

    @property
    def inner(self) -> int:
        return self.down[0].num_inputs

    @property
    def is_gated(self) -> bool:
        return sum(self.gate_up[0].num_outputs) > self.inner

    @property
    def has_bias(self) -> bool:
        return self.down[0].has_bias

    @property
    def is_cut(self) -> bool:
        """Whether this rank computes some columns of every expert."""
        return bool(self.down[0].columns)

    @property
    def parts(self) -> dict[str, tuple[Linear, ...]]:
        return {"gate_up": self.gate_up, "down": self.down}


class Factor(msgspec.Struct):
    """A learned factor of whole rows."""

    name: str
    weight: Tensor = None


class Sinks(msgspec.Struct):
    """A learned score for each query head that takes part in the softmax, without a value (Xiao et al. 2023)."""

    name: str
    num_heads: int
    weight: Tensor = None


class Convolution(msgspec.Struct):
    """Causal convolution of each channel with its own weights (depthwise): y[t] = activation(bias + the sum of weight[j] *
    x[t - kernel + 1 + j]). With `is_gated`, rows are B | C | x of `channels` each, and y = C * convolution(B * x). The tensors
    are `name`.weight [channels, 1, kernel] and `name`.bias."""

    name: str
    channels: int
    kernel: int
    has_bias: bool = False
    activation: Literal["silu", ""] = "silu"
    is_gated: bool = False
    columns: Columns = ()  # channels that this rank computes
    first: int = 0  # column at which the channels begin in a row of the op's input
    names: tuple[str, ...] = ()  # of the tensors, if there are several, each with the same number of channels
    weight: Tensor = None
    bias: Tensor = None

    @property
    def stored_names(self) -> tuple[str, ...]:
        return self.names or (self.name,)


class DeltaRule(msgspec.Struct):
    """Gated delta rule (Yang et al. 2024). For a value head with the state S, a row with its key and query, both normalized to
    length 1 and the query divided by sqrt(key_dim), and its value:

        decay = exp(-exp(A_log) * softplus(a + dt_bias))        beta = sigmoid(b)
        delta = beta * (value - (decay * S)^T key)
        S = decay * S + key delta^T                             result = S^T query

    Each key head serves num_value_heads / num_key_heads consecutive value heads. With `is_per_channel` each key of a head has
    its own decay (Kimi Linear 2025). A_log and dt_bias are stored under `names`: one number for each value head, and of dt_bias
    one for each decay."""

    names: tuple[str, str]  # of A_log and dt_bias
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    is_per_channel: bool = False
    epsilon: float = 1e-6  # of the length's square
    own: HeadRange | None = None  # value heads of this rank, and the key heads that they read; None: all
    first: int = 0  # columns at which queries | keys | values, a, and b begin in rows of their tensors
    decay_first: int = 0
    beta_first: int = 0
    weight: Tensor = None  # -exp(A_log)
    bias: Tensor = None

    @property
    def heads(self) -> HeadRange:
        return self.own or HeadRange(0, self.num_value_heads, 0, self.num_key_heads)

    @property
    def num_decays(self) -> int:
        """Decays of a row in one head."""
        return self.key_dim if self.is_per_channel else 1

    @property
    def rates_shape(self) -> tuple[int, ...]:
        """Shape of A_log."""
        return (1, 1, self.num_value_heads, 1) if self.is_per_channel else (self.num_value_heads,)

    @property
    def log_width(self) -> int:
        """Numbers of a row in the log: keys, deltas and decays."""
        heads = self.num_value_heads * (self.value_dim + self.num_decays)
        return self.num_key_heads * self.key_dim + heads


class StateSpaces(msgspec.Struct):
    """Mamba-2 (Dao and Gu 2024). For a head with the state S [state_dim, head_dim], and a row with B and C of the head's group
    and x:

        dt = softplus(dt + dt_bias) between `least` and `most`
        S = exp(-exp(A_log) * dt) * S + B (dt * x)^T            result = S^T C + D * x

    Each group serves num_heads / num_groups consecutive heads. The tensors A_log, dt_bias and D, [heads] each, are stored under
    `names`."""

    names: tuple[str, str, str]
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    least: float = 0.0
    most: float = math.inf
    own: HeadRange | None = None  # heads of this rank, and the groups that they read; None: all
    first: int = 0  # columns at which x | B | C, and dt begin in rows of their tensors
    decay_first: int = 0
    weight: Tensor = None  # -exp(A_log)
    bias: Tensor = None
    skips: Tensor = None

    @property
    def heads(self) -> HeadRange:
        return self.own or HeadRange(0, self.num_heads, 0, self.num_groups)

    @property
    def log_width(self) -> int:
        """Numbers of a row in the log: B, dt * x and decays."""
        return self.num_groups * self.state_dim + self.num_heads * (self.head_dim + 1)


class GatedNorm(msgspec.Struct):
    """RMSNorm of each `group` numbers with a gate: norm(x) * activation(gate), or with `is_gated_first` norm(x *
    activation(gate)). The tensor `name`.weight has the numbers of one group if these share it, otherwise of all. Without
    `has_norm` x * activation(gate). The op may be called without a gate."""

    name: str
    width: int
    group: int
    epsilon: float
    is_shared: bool = False
    activation: Literal["silu", "sigmoid"] = "silu"
    is_gated_first: bool = False
    has_norm: bool = True
    gate_first: int = 0  # column at which the gate begins in rows of its tensor
    weight: Tensor = None

    @property
    def weight_width(self) -> int:
        return self.group if self.is_shared else self.width


Module = (
    Linear
    | HeadLinear
    | Embedding
    | Norm
    | LayerNorm
    | PositionTable
    | ColumnRules
    | HeadNorm
    | Rotary
    | Router
    | Experts
    | Sinks
    | Factor
    | Convolution
    | DeltaRule
    | StateSpaces
    | GatedNorm
)


class HeadRange(msgspec.Struct, frozen=True):
    """The heads of one rank: queries [first, first + count) and the KV heads that they read."""

    first: int
    count: int
    first_kv: int
    kv_count: int


class AttentionShape(msgspec.Struct, frozen=True):
    """Heads of one layer's attention. `sliding_window` is the number of keys a query sees, itself included; 0: all. With
    `has_chunks` it sees those before it in its own chunk of that many positions. With `is_two_sided` it sees as many after it,
    if its bounds (`first_keys`) allow them. The KV arena holds all heads, on every rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0
    scale: float = 0.0  # of scores; 0: head_dim^-0.5
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay
    has_chunks: bool = False
    is_two_sided: bool = False
    own: HeadRange | None = None  # on this rank; None: all
    sinks: Sinks | None = None  # scores beside those of the keys, after scale and cap; None: none
    has_keys: bool = True  # False: the layer reads the keys and values that another one stored
    has_bounds: bool = True  # False: it is causal, also for rows that have bounds

    @property
    def score_scale(self) -> float:
        return self.scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def heads(self) -> HeadRange:
        return self.own or HeadRange(0, self.num_heads, 0, self.num_kv_heads)

    @property
    def queries_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def keys_width(self) -> int:
        return self.num_kv_heads * self.head_dim


class LatentShape(msgspec.Struct, frozen=True):
    """Heads of one layer's latent attention. A head's query is [plain_dim | rotary_dim]; the cache has one latent and one
    rotated key per position for all heads; `scale` multiplies scores."""

    num_heads: int
    plain_dim: int
    rotary_dim: int
    latent_dim: int
    scale: float
    own: HeadRange | None = None  # on this rank; None: all
    num_kv_heads: ClassVar[int] = 1

    @property
    def heads(self) -> HeadRange:
        return self.own or HeadRange(0, self.num_heads, 0, 1)

    @property
    def head_dim(self) -> int:
        return self.plain_dim + self.rotary_dim

    @property
    def queries_width(self) -> int:
        return self.num_heads * self.head_dim


class LayerCache(msgspec.Struct):
    """One layer's keys and values in the KV arena, in the layout of the op table (`OpTable.cache_view`). With latent attention:
    rotated keys and latents."""

    keys: Tensor
    values: Tensor
    block_size: int
    dtype: str = "float32"  # "float32" | "bfloat16" | "int8"
    table: int = 0  # index of its block table among those of a sequence
    first_head: int = 0  # of this layer in a block
    num_heads: int = 0  # heads of this layer's size in a block; 0: those of the layer

    def heads_of(self, shape: AttentionShape | LatentShape) -> int:
        """Return the heads of this layer's size in a block."""
        return self.num_heads or shape.num_kv_heads


class LayerState(msgspec.Struct, frozen=True):
    """First byte in a state slot of each part of a recurrent layer's state, all float32: the last inputs of the convolution
    [kernel - 1, channels], the matrix [heads, key_dim, value_dim], and the inputs of rows behind the state, [num_logged,
    channels] of the convolution and [num_logged, width] of the recurrence."""

    window: int
    matrix: int
    window_log: int
    matrix_log: int


class StateCache(msgspec.Struct):
    """The state arena (`engine/checkpoint/state_spec.py`): uint8 [num_states + 1, slot_bytes]. Slot 0 is all zeros, the state
    before position 0."""

    memory: Tensor
    num_logged: int  # rows behind a state that may be replayed


class RecurrentCache(msgspec.Struct, frozen=True):
    """One layer's states in the state arena, and its keys and values, if it has attention, too."""

    places: LayerState
    states: StateCache
    layer: LayerCache


class KvCache(msgspec.Struct):
    """The KV arena as tensors.

    slot = block * block_size + offset. Block 0 is the dummy block: padded rows write there, and masked keys are read there.
    """

    block_size: int
    layers: list[LayerCache] = []
    states: StateCache | None = None  # of models with recurrent layers
    layer_states: list[LayerState | None] = []  # of each layer; None: it is not recurrent

    def of_layer(self, index: int) -> LayerCache | RecurrentCache:
        """Return what a layer of the model keeps of sequences."""
        state = self.layer_states[index] if index < len(self.layer_states) else None
        if state is None:
            return self.layers[index]
        assert self.states is not None, "there are places of states, but no states"
        return RecurrentCache(state, self.states, self.layers[index])
