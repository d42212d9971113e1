"""Weights as chunks of output columns, and the columns that a rank has of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from ops.modules import (
    ColumnRules,
    Columns,
    Convolution,
    DeltaRule,
    Embedding,
    Experts,
    Factor,
    GatedNorm,
    HeadLinear,
    HeadNorm,
    LayerNorm,
    Linear,
    Module,
    Norm,
    PositionTable,
    Rotary,
    Router,
    Sinks,
    StateSpaces,
)
from ops.weight_format import Source, Store, float32

OUTPUT_CHUNK = 64  # small enough to stay in the caches, with its inputs, for all rows


LANES = 16  # float32 of a 64-byte line


@dataclass(frozen=True, slots=True)
class Chunks:
    """Weights of a linear [chunks, 1, in, OUTPUT_CHUNK], and the positions of the wanted outputs among all outputs of the
    chunks."""

    weights: paddle.Tensor
    own: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Columns of a result that this rank computes, from `begin` on, out of `width`. `columns`: if they are several spans."""

    tensor: paddle.Tensor
    begin: int
    width: int
    columns: Columns = ()


@dataclass(frozen=True, slots=True)
class StackedChunks:
    """Chunks of all experts with the same columns, [experts, chunks, 1, in, OUTPUT_CHUNK], and views of each expert."""

    weights: paddle.Tensor
    own: tuple[slice, ...]
    each: list[Chunks]


@dataclass(frozen=True, slots=True)
class ExpertChunks:
    """Chunks of experts: every rank has all experts in its own memory."""

    gate_up: StackedChunks
    down: StackedChunks
    gate_up_bias: paddle.Tensor | None  # [experts, wanted outputs]
    down_bias: paddle.Tensor | None

    def arrays(self) -> tuple[()]:
        """Return no arrays: nothing has to be faulted in when an expert moves to a rank."""
        return ()


def pack(module: Module, sources: Mapping[str, Source], store: Store) -> None:
    """Pack everything as float32, for any format of the module, without the store."""
    values = {name: float32(source()) for name, source in sources.items()}
    match module:
        case Linear():
            module.weight = own_chunks(values["weight"], module.columns)
            if "bias" in values:
                own = [values["bias"][begin:end] for begin, end in module.columns or ((0, module.width),)]
                module.bias = paddle.to_tensor(np.concatenate(own))
        case HeadLinear():  # [heads, chunks, 1, in, OUTPUT_CHUNK]
            heads = module.weights_of_heads(values["weight"])
            module.weight = paddle.to_tensor(np.stack([_chunks(heads[head]) for head in module.heads]))
        case Embedding() | Norm():
            module.weight = paddle.to_tensor(values["weight"])
        case LayerNorm():
            module.weight, module.bias = paddle.to_tensor(values["weight"]), paddle.to_tensor(values["bias"])
        case PositionTable():
            module.values = values["weight"]
        case HeadNorm():  # [num_heads + num_kv_heads, width]
            weights = np.stack([values["queries"], values["keys"]])
            module.weight = paddle.to_tensor(np.repeat(weights, [module.num_heads, module.num_kv_heads], axis=0))
        case Rotary():
            module.cosines, module.sines = paddle.to_tensor(values["cosines"]), paddle.to_tensor(values["sines"])
            module.partners = paddle.to_tensor(values["partners"].astype(np.int32))
            if "query_factors" in values:
                module.query_factors = paddle.to_tensor(values["query_factors"])
        case Router():
            module.linear.weight = own_chunks(values["weight"], ())
            module.linear.bias = paddle.to_tensor(values["bias"]) if "bias" in values else None
            module.correction = paddle.to_tensor(values["correction"].reshape(-1)) if "correction" in values else None
            module.scales = paddle.to_tensor(values["scales"]) if "scales" in values else None
        case Experts():
            parts = {
                part: _stacked([values[f"{part}.{index}"] for index in range(len(linears))], linears[0].columns)
                for part, linears in module.parts.items()
            }
            biases = [stacked_biases(module, part, values) for part in parts]
            module.weight = ExpertChunks(parts["gate_up"], parts["down"], *biases)
        case Sinks() | Factor() | GatedNorm():
            module.weight = paddle.to_tensor(values["weight"])
        case ColumnRules():
            module.weight = paddle.to_tensor(values["rules"])
        case Convolution():  # [kernel, channels]
            weight = values["weight"].reshape(module.channels, module.kernel)
            module.weight = paddle.to_tensor(np.ascontiguousarray(weight.T))
            module.bias = paddle.to_tensor(values["bias"]) if module.has_bias else None
        case DeltaRule() | StateSpaces():
            rates = -np.exp(values["A_log"].reshape(-1).astype(np.float64))
            module.weight = paddle.to_tensor(rates.astype(np.float32))
            module.bias = paddle.to_tensor(values["dt_bias"].reshape(-1))
            if isinstance(module, StateSpaces):
                module.skips = paddle.to_tensor(values["D"].reshape(-1))


def stacked_biases(module: Experts, part: str, values: Mapping[str, np.ndarray]) -> paddle.Tensor | None:
    """Return the biases of this rank's columns, [experts, columns]; None: there are none."""
    if not module.has_bias:
        return None
    linears = module.parts[part]
    ranges = linears[0].columns or ((0, linears[0].width),)
    biases = np.stack([values[f"{part}.{index}.bias"] for index in range(len(linears))])
    return paddle.to_tensor(np.concatenate([biases[:, begin:end] for begin, end in ranges], axis=1))


def _stacked(weights: Sequence[np.ndarray], columns: Columns) -> StackedChunks:
    first, own = _cut(weights[0], columns)
    stacked = np.empty((len(weights), *first.shape), np.float32)
    for expert, weight in enumerate(weights):
        stacked[expert] = _cut(weight, columns)[0]
    all_weights = paddle.to_tensor(stacked)
    return StackedChunks(all_weights, own, [Chunks(all_weights[expert], own) for expert in range(len(weights))])


def own_chunks(weight: np.ndarray, columns: Columns) -> Chunks:
    chunks, own = _cut(weight, columns)
    return Chunks(paddle.to_tensor(chunks), own)


def _cut(weight: np.ndarray, columns: Columns) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Return the chunks of [out, in] with these columns (empty: all), and the positions of these among all columns of the
    chunks."""
    whole, ranges = _chunks(weight), columns or ((0, len(weight)),)
    places = sorted({place for begin, end in ranges for place in range(begin // OUTPUT_CHUNK, -(-end // OUTPUT_CHUNK))})
    firsts = [places.index(begin // OUTPUT_CHUNK) * OUTPUT_CHUNK + begin % OUTPUT_CHUNK for begin, _ in ranges]
    own = tuple(slice(first, first + end - begin) for first, (begin, end) in zip(firsts, ranges, strict=True))
    if len(places) == 1:  # at least two
        places.append(places[0] - 1)
    return whole[places], own


def _chunks(weight: np.ndarray) -> np.ndarray:
    """Return [out, in] as [chunks, 1, in, OUTPUT_CHUNK], both padded with zeros."""
    num_chunks = max(2, -(-len(weight) // OUTPUT_CHUNK))
    padding = (0, num_chunks * OUTPUT_CHUNK - len(weight)), (0, -weight.shape[1] % LANES)
    chunks = np.pad(weight, padding).reshape(num_chunks, 1, OUTPUT_CHUNK, -1)
    return np.ascontiguousarray(chunks.swapaxes(2, 3))


def expand(x: paddle.Tensor, shape: list[int]) -> paddle.Tensor:
    """Expand, since Paddle's broadcasting within an operation is many times slower than this and the operation on equal
    shapes."""
    return paddle.expand(x, shape)


def whole_lines(x: paddle.Tensor) -> paddle.Tensor:
    """Return `x` with its last axis padded to a multiple of LANES."""
    padding = -x.shape[-1] % LANES
    return paddle.concat([x, paddle.zeros([*x.shape[:-1], padding])], axis=-1) if padding else x


def product(x: paddle.Tensor, chunks: Chunks) -> paddle.Tensor:
    rows = x.shape[0]
    y = paddle.matmul(whole_lines(x).reshape([1, rows, 1, -1]), chunks.weights)
    return columns_of(y.reshape([-1, rows, OUTPUT_CHUNK]).transpose([1, 0, 2]).reshape([rows, -1]), chunks.own)


def width_of(own: tuple[slice, ...]) -> int:
    return sum(part.stop - part.start for part in own)


def columns_of(y: paddle.Tensor, own: tuple[slice, ...]) -> paddle.Tensor:
    """Return the wanted outputs among those of some chunks."""
    if y.shape[1] == width_of(own):
        return y
    parts = [y[:, part] for part in own]
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=1)


def own_columns(x: paddle.Tensor | Cut) -> paddle.Tensor:
    """Return this rank's columns of x."""
    return x.tensor if isinstance(x, Cut) else x


def like(x: paddle.Tensor | Cut, own: paddle.Tensor) -> paddle.Tensor | Cut:
    """Return this rank's columns `own` as those that x has."""
    return Cut(own, x.begin, x.width, x.columns) if isinstance(x, Cut) else own


def part_of(x: paddle.Tensor | Cut, spans: Columns) -> paddle.Tensor:
    """Return the columns `spans` of the whole result, side by side; this rank has them."""
    tensor = own_columns(x)
    held: Columns = ((0, tensor.shape[1]),)
    if isinstance(x, Cut):
        held = x.columns or ((x.begin, x.begin + tensor.shape[1]),)
    starts = [sum(end - begin for begin, end in held[:number]) for number in range(len(held))]
    parts = [
        tensor[:, at + first - begin : at + last - begin]
        for first, last in spans
        for at, (begin, end) in zip(starts, held, strict=True)
        if begin <= first and last <= end
    ]
    assert len(parts) == len(spans), f"of the columns {spans} this rank has only {held}"
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=1)
