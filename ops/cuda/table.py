"""The op table of CUDA's rows: a driver and these kernels are all that it needs.

Tensors are `CudaArray`s; arrays of the host (numpy's, and Paddle's on a CPU) are accepted where kernels are emulated without a
driver. Activations have the table's type, float32 or bfloat16; sums, norms, scores and logits are float32. Weights are of that
type, or int8, int4 and float4 as stored in a checkpoint or as rounded by the native table; keys and values may have any type of
`operands.h`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ops.cuda.array import DTYPES, CardMemory, CudaArray, HostMemory, array_on, empty_on
from ops.cuda.layer_rows import CudaLayerMemory
from ops.cuda.library import Library
from ops.cuda.operands import TYPES, bound
from ops.cuda.packing import INTEGERS, PackedExperts, PackedLinear, Packer
from ops.cuda.recurrence import RecurrentOps
from ops.cuda.sharing import SharedExperts, SharedMemory, Windows
from ops.cuda.stored import Holder, Stored
from ops.layer_rows import DeviceStep, LayerSizes
from ops.modules import (
    ACTIVATIONS,
    AdaptedPart,
    Adapters,
    AttentionShape,
    ColumnRules,
    Embedding,
    ExpertAdapters,
    Experts,
    Factor,
    GateClamp,
    HeadLinear,
    HeadNorm,
    KvCache,
    LatentShape,
    LayerCache,
    LayerNorm,
    Linear,
    Norm,
    Rotary,
    Router,
    Tensor,
    TypedPositions,
)
from ops.step_layout import InPlace
from ops.table import HAS_BOUNDS, KEY_SPLIT, AttentionMetadata, DeviceSampler, Inputs, OpTable, Routing, StepInputs

KV_TYPES = ("float32", "float16", "bfloat16", "int8", "float8")
KEYS_OF_PART = 512  # PART in attention.cu
_TILE_ROWS = 16  # rows of an expert's tile, TILE_ROWS in linear.h
_MAX_PART_NUMBERS = 1 << 24  # scratch memory for parts of attention; beyond it, one block computes all parts of a row
_LINE_BYTES = 64  # LINE_BYTES in exchange.cu
_MOST_BYTES = (1 << 31) - _LINE_BYTES  # of a half of lent memory, which kernels count in 32 bits
_ROW_TILE = 2  # rows need no padding, but attention needs the tiles that inputs of padded rows have


class Angles(NamedTuple):
    """Operands with these names."""

    angle_rows: Tensor
    cosines: Tensor
    sines: Tensor
    partners: Tensor


class Step(NamedTuple):
    inputs: AttentionMetadata
    block_size: int


def make_table(
    library: Library,
    memory: CardMemory | None = None,
    stream: Callable[[], int] = lambda: 0,
    dtype: str = "float32",
    windows: Callable[[], Windows] | None = None,
    shared: Callable[[], SharedMemory] | None = None,
    holder: Holder | None = None,
) -> OpTable:
    """Return the table. `memory`: of the card, by default the host's, for kernels that are emulated without a driver. `stream`:
    returns the address of the current stream. `dtype`: of activations. `windows`: returns those of ranks that share a model;
    `shared`: what ranks that share experts have in common. `holder`: of loaded weights."""
    memory = memory or HostMemory()
    ops = CudaOps(library, memory, stream, dtype, windows, shared)
    recurrent = RecurrentOps(ops._run, ops._converted, dtype_of)
    return OpTable(
        name="cuda",
        max_head_dim=512,
        row_tile=_ROW_TILE,
        pack=Packer(memory, dtype).pack,
        layout=None,
        stored=Stored(memory, dtype, holder),
        integer_kinds=INTEGERS,
        cache_view=lambda memory, block_size: memory,
        clear_block=ops.clear_block,
        drawing=DeviceSampler(ops.draw, is_greedy=False),
        layer_memory=ops.layer_memory,
        sync_free_ops={} if shared is None else {"experts": functools.partial(ops.experts, are_alike=True)},
        begin=ops.begin,
        embedding=ops.embedding,
        take_features=ops.take_features,
        linear=ops.linear,
        adapt=ops.adapt,
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        rotary_angles=ops.rotary_angles,
        rotate_and_store=ops.rotate_and_store,
        normalize_wide=ops.normalize_wide,
        attention=ops.attention,
        keep_rows=ops.keep_rows,
        activate_and_multiply=ops.activate_and_multiply,
        scale_and_add=ops.scale_and_add,
        multiply=ops.multiply,
        query_factors=ops.query_factors,
        take_rows=ops.take_rows,
        all_gather=ops.all_gather,
        route=ops.route,
        choose=ops.choose,
        experts=ops.experts,
        store_latent=ops.store_latent,
        latent_attention=ops.latent_attention,
        head_linear=ops.head_linear,
        layer_norm=ops.layer_norm,
        add_layer_norm=ops.add_layer_norm,
        activate=ops.activate,
        join_rows=ops.join_rows,
        mean_rows=ops.mean_rows,
        adjust_columns=ops.adjust_columns,
        convolve=recurrent.convolve,
        delta_rule=recurrent.delta_rule,
        state_space=recurrent.state_space,
        gated_norm=recurrent.gated_norm,
    )


def describe(tensor: Tensor) -> tuple[int, int]:
    """Return address and size in bytes of an array on the card, or of Paddle's on a CPU."""
    if isinstance(tensor, CudaArray):
        return tensor.address, tensor.num_bytes
    assert tensor.is_contiguous(), "the tensor must be contiguous"
    return tensor.data_ptr(), tensor.size * tensor.element_size()


def _cut_of(tensor: Tensor) -> tuple[int, int] | None:
    return tensor.cut if isinstance(tensor, CudaArray) else None


def _spans(parts: Sequence[AdaptedPart], module: Linear) -> Iterator[tuple[AdaptedPart, range, int]]:
    """Yield each adapted part with a span of its outputs that this rank has, among all outputs, and the span's first column."""
    for part in parts:
        column = 0
        for begin, end in module.columns or ((0, module.width),):
            span = range(max(begin, part.first), min(end, part.first + part.num_outputs))
            if span:
                yield part, span, column + span.start - begin
            column += end - begin


def dtype_of(tensor: Tensor) -> str:
    return tensor.dtype if isinstance(tensor, CudaArray) else "float32"


def _cache(cache: LayerCache, shape: AttentionShape | LatentShape) -> dict[str, Any]:
    """Return `Cache` of operands.h. In a block, block_size * kv_heads scales follow the keys' numbers."""
    dims = (shape.rotary_dim, shape.latent_dim) if isinstance(shape, LatentShape) else (shape.head_dim, shape.head_dim)
    return {
        "keys": cache.keys,
        "values": cache.values,
        "type": TYPES[cache.dtype],
        "block_size": cache.block_size,
        "kv_heads": cache.heads_of(shape),
        "key_dim": dims[0],
        "value_dim": dims[1],
        "key_bytes": cache.keys.shape[1],
        "value_bytes": cache.values.shape[1],
    }


class CudaOps:
    """The ops, in the order of `stream`."""

    def __init__(
        self,
        library: Library,
        memory: CardMemory,
        stream: Callable[[], int],
        dtype: str,
        windows: Callable[[], Windows] | None,
        shared: Callable[[], SharedMemory] | None,
    ) -> None:
        self._library, self._memory, self._stream, self._dtype, self._windows = library, memory, stream, dtype, windows
        self._shared = None if shared is None else SharedExperts(shared, self._run, memory, dtype)
        self._kept: dict[tuple[tuple[int, int], ...], CudaArray] = {}  # ids that have the row of another one

    def _run(self, row: str, **values: Any) -> dict[str, CudaArray]:
        """Run a row and return the results that are not given."""
        filled, made = bound(row, self._describe, self._make, values)
        self._library.run(row, filled, self._stream())
        return made

    def _describe(self, tensor: Tensor) -> tuple[int, int]:
        if isinstance(tensor, np.ndarray):
            assert tensor.flags.c_contiguous, "the array must be contiguous"
            return self._memory.host_address(tensor), tensor.nbytes
        return describe(tensor)

    def _make(self, shape: Sequence[int], dtype: str) -> CudaArray:
        return empty_on(self._memory, shape, dtype)

    def clear_block(self, cache: KvCache, block: int) -> None:
        for layer in cache.layers:
            for part in (layer.keys, layer.values):
                if isinstance(part, CudaArray):
                    row = part[block]
                    self._memory.write(row.address, np.zeros(row.num_bytes, np.uint8))
                else:
                    part[block] = 0

    # ---------------------------------------------------------------------------------------------------- a step's inputs

    def begin(self, inputs: Inputs, cache: KvCache) -> Step:
        if self._shared is not None:
            self._shared.begin(inputs)
        if inputs.is_made_on_device:  # the slots of the first block table, too
            self._derive(cast(InPlace, inputs), cache.block_size)
        for number in range(inputs.is_made_on_device, len(inputs.block_tables)):
            self._run(
                "Begin",
                block_tables=inputs.block_tables[number],
                positions=inputs.positions,
                row_slots=inputs.row_slots,
                slot_mapping=inputs.slot_mappings[number],
                num_rows=inputs.num_rows,
                blocks_per_slot=inputs.block_tables[number].shape[1],
                block_size=cache.block_size,
            )
        return Step(inputs, cache.block_size)

    def _derive(self, memory: InPlace, block_size: int) -> None:
        sizes = memory.sizes
        numbers = {name: getattr(sizes, name) for name in ("num_slots", "num_positions", "num_blocks", "max_rows", "max_tiles")}
        self._run(
            "Derive",
            sent=memory.sent,
            slots=memory.slots,
            derived=memory.derived,
            block_size=block_size,
            num_rows=memory.num_rows,
            tile_rows=memory.tile_rows,
            num_kept=memory.kept.num_rows,
            kept_tile_rows=memory.kept.tile_rows,
            **numbers,
        )

    def draw(self, inputs: StepInputs, logits: CudaArray) -> CudaArray:
        rows, vocab = logits.shape
        memory = cast(InPlace, inputs)
        return self._run(
            "Sample",
            logits=logits,
            logit_row_ids=inputs.logit_row_ids,
            row_ids=inputs.kept.row_ids,
            row_slots=inputs.row_slots,
            positions=inputs.kept.positions,
            sequence_offsets=inputs.kept.sequence_offsets,
            sequence_slots=inputs.sequence_slots,
            context_lengths=inputs.context_lengths,
            sent=memory.sent,
            slots=memory.slots,
            num_rows=rows,
            vocab=vocab,
            num_slots=memory.sizes.num_slots,
            num_positions=memory.sizes.num_positions,
            num_blocks=memory.sizes.num_blocks,
        )["drawn"]

    def layer_memory(self, step: DeviceStep, columns: CudaArray, sizes: LayerSizes) -> CudaLayerMemory:
        def zeros(num_rows: int) -> CudaArray:
            dtype = DTYPES[self._dtype]
            return array_on(self._memory, np.zeros((num_rows, sizes.hidden_size), dtype), self._dtype)

        def floats(x: Tensor) -> CudaArray:
            return cast(CudaArray, self._converted(x, "float32"))

        return CudaLayerMemory(self._run, self._make, zeros, floats, step, columns, sizes)

    # --------------------------------------------------------------------------------------------------------- lookups

    def embedding(self, inputs: Inputs, module: Embedding) -> CudaArray:
        ids = inputs.position_rows if isinstance(module, TypedPositions) else inputs.token_ids
        packed: PackedLinear = module.weight
        dtype = packed.type if packed.type in DTYPES else self._dtype  # floats stay as they are packed
        same = () if isinstance(module, TypedPositions) else tuple(inputs.same_inputs)
        numbers = {"num_rows": inputs.num_rows, "num_same": len(same)}
        same_ids = self._same_ids(same) if same else None
        y = self._run("Embed", type=TYPES[dtype], ids=ids, same=same_ids, weights=packed.operands(), **numbers)["y"]
        converted: CudaArray = self._converted(y, self._dtype)
        return converted

    def _same_ids(self, pairs: tuple[tuple[int, int], ...]) -> CudaArray:
        if pairs not in self._kept:
            self._kept[pairs] = array_on(self._memory, np.array(pairs, np.int32))
        return self._kept[pairs]

    def take_rows(self, x: Tensor, row_ids: Tensor) -> CudaArray:
        return self._take_rows(x, row_ids, row_ids.shape[0])

    def _take_rows(self, x: Tensor, row_ids: Tensor, num_rows: int) -> CudaArray:
        width = x.shape[1]
        return self._run("TakeRows", type=TYPES[dtype_of(x)], x=x, ids=row_ids, num_rows=num_rows, width=width)["y"]

    def keep_rows(self, step: Step, *tensors: Tensor) -> tuple[Any, ...]:
        kept = cast(StepInputs, step.inputs).kept
        if self._shared is not None:
            self._shared.keep_rows()
        return Step(kept, step.block_size), *(self._take_rows(x, kept.row_ids, kept.num_rows) for x in tensors)

    def take_features(self, step: Any, x: CudaArray, number: int) -> CudaArray:
        inputs: AttentionMetadata = getattr(step, "inputs", step)
        features, width = inputs.features, x.shape[1]
        assert features is not None, "the model has no media features"
        self._run(
            "TakeFeatures",
            type=TYPES[dtype_of(x)],
            x=x,
            features=features,
            feature_rows=inputs.feature_rows,
            num_features=len(features),
            row_bytes=features.strides[0],
            are_bfloat16=features.dtype == np.uint16,
            first=number * width,
            num_rows=x.shape[0],
            width=width,
            are_added=number > 0,
        )
        return x

    def query_factors(self, inputs: Inputs, module: Rotary) -> CudaArray:
        return self._take_rows(module.query_factors, inputs.positions, inputs.num_rows)

    # --------------------------------------------------------------------------------------------------------- linears

    def linear(self, x: Tensor, module: Linear) -> CudaArray:
        packed: PackedLinear = module.weight
        is_float = packed.type == "float32"
        x = self._converted(x, "float32" if is_float else self._dtype)
        weights, num_rows = packed.operands(), x.shape[0]
        has_floats = module.has_float_outputs and x.dtype != "float32" if isinstance(x, CudaArray) else False
        given: dict[str, Any] = {"floats": None}
        if has_floats:
            given = {"floats": self._make((num_rows, packed.num_outputs), "float32"), "y": None}
        given |= self._shares(packed, num_rows)
        made = self._run("Linear", type=TYPES[dtype_of(x)], x=x, weights=weights, bias=module.bias, num_rows=num_rows, **given)
        y: CudaArray = given["floats"] if has_floats else made["y"]
        if not module.has_float_outputs:
            y = self._converted(y, self._dtype)
        if module.columns:
            y.cut = module.columns[0][0], module.width
        return y

    def _shares(self, packed: PackedLinear, num_rows: int) -> dict[str, Any]:
        """Return the memory through which blocks share a small matrix for few rows."""
        if packed.arrivals is None or num_rows > _TILE_ROWS:
            return {"parts": None, "arrivals": None}
        parts = self._make((packed.num_parts * _TILE_ROWS, packed.num_outputs), "float32")
        return {"parts": parts, "arrivals": packed.arrivals}

    def _converted(self, x: Tensor, dtype: str) -> Tensor:
        """Return x in another type of floats."""
        if dtype_of(x) == dtype:
            return x
        is_to_float = dtype == "float32"
        y = self._make(x.shape, dtype)
        given = {"x": x, "floats": y} if is_to_float else {"x": y, "floats": x}
        narrow = dtype_of(x) if is_to_float else dtype
        self._run("Convert", type=TYPES[narrow], **given, count=y.size, is_to_float=is_to_float)
        return y

    def adapt(self, step: Any, y: Tensor, x: Tensor, module: Linear) -> Tensor:
        inputs: AttentionMetadata = getattr(step, "inputs", step)
        adapters = module.adapters
        assert adapters is not None, f"{module.name} has no adapters"
        self._adapt(y, x, adapters.parts, module, adapters, {"slots_of_rows": inputs.adapter_slots})
        return y

    def _adapt(
        self,
        y: Tensor,
        x: Tensor,
        parts: Sequence[AdaptedPart],
        module: Linear,
        adapters: Adapters | ExpertAdapters,
        of_choices: dict[str, Any],
    ) -> None:
        """Add the terms of `parts`. `of_choices`: operands that say which adapter a row has."""
        num_slots, slot_numbers = adapters.slots.shape
        values = {"ids": None, "index_step": 0, "number_step": 0, "num_chosen": 1, "x_divisor": 1, **of_choices}
        for part, span, first in _spans(parts, module):
            self._run(
                "Adapt",
                type=TYPES[dtype_of(y)],
                x=self._converted(x, dtype_of(y)),
                y=y,
                slots=adapters.slots,
                ranks=adapters.ranks,
                num_slots=num_slots,
                slot_numbers=slot_numbers,
                num_modules=adapters.ranks.shape[1],
                num_rows=y.shape[0],
                num_inputs=module.num_inputs,
                width=y.shape[1],
                first=first,
                first_output=span.start - part.first,
                num_outputs=len(span),
                index=part.index,
                first_a=part.a,
                first_b=part.b,
                **values,
            )

    def head_linear(self, x: Tensor, module: HeadLinear) -> CudaArray:
        packed: PackedLinear = module.weight
        heads, num_rows = len(module.heads), x.shape[0]
        y = self._run(
            "HeadLinear",
            type=TYPES[dtype_of(x)],
            x=x,
            weights=packed.operands(),
            num_rows=num_rows,
            heads=heads,
            stride=x.shape[1] // heads,
        )["y"]
        if heads < module.num_heads:
            y.cut = module.heads.start * module.num_outputs, module.num_heads * module.num_outputs
        return y

    # ------------------------------------------------------------------------------------------- norms and activations

    def rms_norm(self, x: Tensor, module: Norm) -> CudaArray:
        return self._norm(x, module)

    def add_rms_norm(self, x: Tensor, residual: Tensor, module: Norm) -> tuple[CudaArray, CudaArray]:
        total = self._make(x.shape, dtype_of(x))
        return self._norm(x, module, residual, total), total

    def layer_norm(self, x: Tensor, module: LayerNorm) -> CudaArray:
        return self._norm(x, module)

    def add_layer_norm(self, x: Tensor, residual: Tensor, module: LayerNorm) -> tuple[CudaArray, CudaArray]:
        total = self._make(x.shape, dtype_of(x))
        return self._norm(x, module, residual, total), total

    def _norm(
        self, x: Tensor, module: Norm | LayerNorm, other: Tensor | None = None, total: CudaArray | None = None, **where: Any
    ) -> CudaArray:
        """Normalize rows of `x`, or of x + other, or the columns that `where` says, into the array `y` of it."""
        num_rows, stride = x.shape
        group = module.head_dim if isinstance(module, Norm) and module.head_dim else module.width
        y = where.pop("y", None) or self._make(x.shape, dtype_of(x))
        self._run(
            "Norm",
            type=TYPES[dtype_of(x)],
            x=x,
            other=None if other is None else self._converted(other, dtype_of(x)),
            total=total,
            y=y,
            weight=module.weight,
            bias=module.bias if isinstance(module, LayerNorm) else None,
            epsilon=module.epsilon,
            num_rows=num_rows,
            stride=stride,
            first=where.pop("first", 0),
            groups=module.width // group,
            width=group,
            is_centered=isinstance(module, LayerNorm) or group != module.width,
        )
        return y

    def normalize_wide(self, qkv: Tensor, query_norm: Norm, key_norm: Norm, shape: AttentionShape) -> CudaArray:
        y, queries, keys = self._make(qkv.shape, dtype_of(qkv)), shape.queries_width, shape.keys_width
        self._norm(qkv, query_norm, y=y)
        self._norm(qkv, key_norm, y=y, first=queries)
        self._copy_columns(qkv, y, queries + keys, keys, queries + keys)
        if shape.own is None:
            return y
        own, dim = shape.own, shape.head_dim
        cut, at = self._make([qkv.shape[0], (own.count + 2 * own.kv_count) * dim], dtype_of(qkv)), 0
        for first, count in (
            (own.first * dim, own.count * dim),
            (queries + own.first_kv * dim, own.kv_count * dim),
            (queries + keys + own.first_kv * dim, own.kv_count * dim),
        ):
            self._copy_columns(y, cut, first, count, at)
            at += count
        return cut

    def _copy_columns(self, x: Tensor, y: CudaArray, first: int, count: int, first_of_y: int) -> None:
        self._run(
            "CopyColumns",
            type=TYPES[dtype_of(x)],
            x=x,
            y=y,
            num_rows=x.shape[0],
            width=x.shape[1],
            first=first,
            count=count,
            width_of_y=y.shape[1],
            first_of_y=first_of_y,
        )

    def activate(self, x: Tensor, activation: str) -> CudaArray:
        y = self._activate(x, x.shape[1], activation, None, is_gated=False)
        y.cut = _cut_of(x)
        return y

    def activate_and_multiply(self, x: Tensor, activation: str, clamp: GateClamp | None = None) -> CudaArray:
        y, cut = self._activate(x, x.shape[1] // 2, activation, clamp, is_gated=True), _cut_of(x)
        if cut is not None:
            y.cut = cut[0], cut[1] // 2
        return y

    def _activate(self, x: Tensor, width: int, activation: str, clamp: GateClamp | None, *, is_gated: bool) -> CudaArray:
        return self._run(
            "Activate",
            type=TYPES[dtype_of(x)],
            x=x,
            num_rows=x.shape[0],
            width=width,
            is_gated=is_gated,
            activation=ACTIVATIONS.index(activation),
            alpha=0.0 if clamp is None else clamp.alpha,
            limit=0.0 if clamp is None else clamp.limit,
        )["y"]

    def scale_and_add(self, x: Tensor, factor: float, other: Tensor | None) -> CudaArray:
        y, count = self._make(x.shape, dtype_of(x)), math.prod(x.shape)
        other = None if other is None else self._converted(other, dtype_of(x))
        self._run("ScaleAndAdd", type=TYPES[dtype_of(x)], x=x, other=other, y=y, factor=factor, count=count)
        return y

    def multiply(self, x: Tensor, factors: Tensor | Factor) -> CudaArray:
        values, num_factors = (factors.weight, 0) if isinstance(factors, Factor) else (factors, factors.shape[1])
        y = self._run(
            "Multiply",
            type=TYPES[dtype_of(x)],
            x=x,
            factors=self._converted(values, dtype_of(x)),
            num_rows=x.shape[0],
            width=x.shape[1],
            num_factors=num_factors,
        )["y"]
        y.cut = _cut_of(x)
        return y

    def join_rows(self, x: CudaArray, count: int, counter: np.ndarray) -> CudaArray:
        return x.reshape([-1, count * x.shape[1]])

    def mean_rows(self, x: Tensor, count: int, counter: np.ndarray) -> CudaArray:
        rows, width = x.shape
        return self._run("MeanRows", type=TYPES[dtype_of(x)], x=x, num_rows=rows // count, group=count, width=width)["y"]

    def adjust_columns(self, parts: Sequence[Tensor], module: ColumnRules) -> CudaArray:
        y, first = self._make([parts[0].shape[0], module.width], dtype_of(parts[0])), 0
        for x in parts:
            rows, width = x.shape
            numbers = {"num_rows": rows, "width": width, "first": first, "width_of_y": module.width}
            self._run("AdjustColumns", type=TYPES[dtype_of(x)], x=x, y=y, rules=module.weight, **numbers)
            first += width
        return y

    def all_gather(self, x: Tensor) -> Tensor:
        if _cut_of(x) is None:
            return x
        (begin, width), (num_rows, own) = x.cut, x.shape
        assert self._windows is not None, f"columns from {begin} of {width}, but there are no ranks with the others"
        windows = self._windows()
        half_bytes = min((windows.num_bytes - _LINE_BYTES) // (2 * _LINE_BYTES) * _LINE_BYTES, _MOST_BYTES)
        needed = num_rows * own * DTYPES[x.dtype].itemsize + _LINE_BYTES
        assert needed <= half_bytes, f"{num_rows} rows of {own} columns need {needed} bytes, limit {half_bytes}"
        return self._run(
            "Gather",
            type=TYPES[x.dtype],
            x=x,
            windows=windows.operands(),
            num_rows=num_rows,
            own=own,
            begin=begin,
            width=width,
            half_bytes=half_bytes,
        )["y"]

    # --------------------------------------------------------------------------------------------------------- experts

    def route(self, step: Any, x: Tensor, module: Router) -> Routing:
        inputs: AttentionMetadata | None = getattr(step, "inputs", step)
        offsets = None if inputs is None else inputs.sequence_offsets
        logits, rule = self.linear(x, module.linear), module.rule
        if module.linear.adapters is not None:
            logits = self.adapt(step, logits, x, module.linear)
        chosen = self._run(
            "Route",
            logits=self._converted(logits, "float32"),
            correction=module.correction,
            scales=module.scales,
            expert_sets=None if module.set is None or inputs is None else inputs.expert_sets,
            num_tokens=None if offsets is None else offsets[len(offsets) - 1 :],
            added_to_sum=rule.added_to_sum,
            smallest_sum=rule.smallest_sum,
            factor=rule.factor,
            num_rows=x.shape[0],
            num_experts=module.num_experts,
            num_chosen=rule.num_chosen,
            num_groups=rule.num_groups,
            num_chosen_groups=rule.num_chosen_groups,
            num_best=rule.num_best,
            has_sigmoid=rule.scoring == "sigmoid",
            is_normalized=rule.is_normalized,
            set=module.set or 0,
        )
        return Routing(chosen["ids"], chosen["weights"], getattr(inputs, "adapter_slots", None))

    def choose(self, routing: Routing, index: int) -> tuple[Routing, CudaArray]:
        rows, num_chosen = routing.ids.shape
        numbers = {"num_rows": rows, "num_chosen": num_chosen, "index": index}
        made = self._run("Choose", type=TYPES[self._dtype], ids=routing.ids, weights=routing.weights, **numbers)
        return Routing(made["chosen"], made["ones"], routing.adapter_slots), made["factors"]

    def experts(
        self,
        x: Tensor,
        routing: Routing,
        module: Experts,
        activation: str,
        shared: Tensor | None = None,
        *,
        are_alike: bool = False,
    ) -> CudaArray:
        """`are_alike`: ranks that share experts have as many rows."""
        if module.owners is None or self._shared is None:
            results = self._results(x, routing, module, activation)
        else:
            taken = self._shared.take(self._converted(x, self._dtype), routing, module, are_alike=are_alike)
            results = self._shared.results(self._results(taken.rows, taken.routing, module, activation), taken)
        rows, num_chosen = routing.ids.shape
        y = self._run(
            "Combine",
            type=TYPES[dtype_of(results)],
            results=results,
            shared=shared,
            ids=routing.ids,
            weights=routing.weights,
            num_rows=rows,
            num_chosen=num_chosen,
            width=results.shape[-1],
        )["y"]
        if module.is_cut:
            y.cut = module.down[0].columns[0][0], module.num_inputs
        return y

    def _results(self, x: Tensor, routing: Routing, module: Experts, activation: str) -> CudaArray:
        """Return the result of each choice, [R * chosen, width]; those without an expert are undefined."""
        packed: PackedExperts = module.weight
        lists = self._dispatch(routing.ids, module.num_experts)
        both = self._expert_linear(x, packed.gate_up, packed.gate_up_bias, lists, routing.ids.shape[1])
        if module.adapters is not None:
            self._adapt_experts(both, x, "gate_up", routing, module, routing.ids.shape[1])
        activated = self.activate_and_multiply(both, activation, module.clamp)
        if module.is_cut:
            activated.cut = module.gate_up[0].columns[0][0], module.inner
            activated = self.all_gather(activated)
        results = self._expert_linear(activated, packed.down, packed.down_bias, lists, 1)
        if module.adapters is not None:
            self._adapt_experts(results, activated, "down", routing, module, 1)
        return results

    def _adapt_experts(self, y: CudaArray, x: Tensor, part: str, routing: Routing, module: Experts, x_divisor: int) -> None:
        adapters = module.adapters
        assert adapters is not None
        of_choices = {
            "slots_of_rows": routing.adapter_slots,
            "ids": routing.ids,
            "index_step": adapters.index_step,
            "number_step": adapters.float_step,
            "num_chosen": routing.ids.shape[1],
            "x_divisor": x_divisor,
        }
        self._adapt(y, x, getattr(adapters, part), getattr(module, part)[0], adapters, of_choices)

    def _dispatch(self, ids: CudaArray, num_experts: int) -> dict[str, CudaArray]:
        num_choices = math.prod(ids.shape)
        max_tiles = num_choices // _TILE_ROWS + num_experts
        return self._run("Dispatch", ids=ids, num_choices=num_choices, num_experts=num_experts, max_tiles=max_tiles)

    def _expert_linear(
        self, x: Tensor, packed: PackedLinear, bias: CudaArray | None, lists: dict[str, CudaArray], x_divisor: int
    ) -> CudaArray:
        """Run a linear of experts; rows of choices without an expert are undefined."""
        y = self._make([len(lists["choices"]), packed.num_outputs], self._dtype)
        self._run(
            "ExpertLinear",
            type=TYPES[self._dtype],
            x=self._converted(x, self._dtype),
            y=y,
            **lists,
            weights=packed.operands(),
            bias=bias,
            max_tiles=len(lists["tile_experts"]),
            x_divisor=x_divisor,
        )
        return y

    # ------------------------------------------------------------------------------------------------------- attention

    def rotary_angles(self, inputs: Inputs, module: Rotary) -> Angles:
        if module.is_by_row:
            return Angles(inputs.row_numbers, inputs.row_cosines, inputs.row_sines, module.partners)
        return Angles(inputs.positions, module.cosines, module.sines, module.partners)

    def rotate_and_store(
        self, inputs: Inputs, qkv: Tensor, angles: Angles, norm: HeadNorm | None, shape: AttentionShape, cache: LayerCache
    ) -> CudaArray:
        heads = shape.heads
        return self._run(
            "RotateAndStore",
            type=TYPES[dtype_of(qkv)],
            qkv=qkv,
            cache=_cache(cache, shape),
            slot_mapping=inputs.slot_mappings[cache.table],
            **angles._asdict(),
            norm_weight=None if norm is None else norm.weight,
            epsilon=0.0 if norm is None else norm.epsilon,
            is_normalized_after=norm is not None and norm.is_after_rotation,
            has_values=norm is not None and norm.has_values,
            num_rows=inputs.num_rows,
            heads=heads.count,
            kv_heads=heads.kv_count if shape.has_keys else 0,
            first_kv=cache.first_head + heads.first_kv,
        )["queries"]

    def store_latent(
        self,
        inputs: Inputs,
        queries: Tensor,
        compressed: Tensor,
        angles: Angles,
        norm: Norm,
        shape: LatentShape,
        cache: LayerCache,
    ) -> CudaArray:
        return self._run(
            "StoreLatent",
            type=TYPES[dtype_of(queries)],
            queries=queries,
            compressed=compressed,
            cache=_cache(cache, shape),
            slot_mapping=inputs.slot_mappings[cache.table],
            **angles._asdict(),
            norm_weight=norm.weight,
            epsilon=norm.epsilon,
            num_rows=inputs.num_rows,
            heads=shape.heads.count,
            plain_dim=shape.plain_dim,
        )["rotated"]

    def attention(self, step: Step, queries: Tensor, shape: AttentionShape, cache: LayerCache) -> CudaArray:
        y = self._attend(step, queries, cache, shape, shape.head_dim, shape.score_scale, shape.sliding_window)
        if shape.own is not None:
            y.cut = shape.own.first * shape.head_dim, shape.queries_width
        return y

    def latent_attention(
        self, step: Step, absorbed: CudaArray, queries: CudaArray, shape: LatentShape, cache: LayerCache
    ) -> CudaArray:
        rows, heads, latent, rotary = absorbed.shape[0], shape.heads.count, shape.latent_dim, shape.rotary_dim
        both = self._make([rows * heads, latent + rotary], dtype_of(absorbed))
        self._copy_columns(absorbed.reshape([rows * heads, -1]), both, 0, latent, 0)
        self._copy_columns(queries.reshape([rows * heads, -1]), both, shape.plain_dim, rotary, latent)
        return self._attend(step, both.reshape([rows, -1]), cache, shape, latent, shape.scale, 0)

    @staticmethod
    def _sinks(shape: AttentionShape | LatentShape) -> Tensor | None:
        """Return the sinks of this rank's heads."""
        if isinstance(shape, LatentShape) or shape.sinks is None:
            return None
        return shape.sinks.weight[shape.heads.first : shape.heads.first + shape.heads.count]

    def _attend(
        self,
        step: Step,
        queries: Tensor,
        cache: LayerCache,
        shape: AttentionShape | LatentShape,
        value_dim: int,
        scale: float,
        window: int,
    ) -> CudaArray:
        inputs, heads, is_latent = step.inputs, shape.heads, isinstance(shape, LatentShape)
        num_parts = -(-inputs.num_key_splits * KEY_SPLIT // KEYS_OF_PART)
        num_numbers = inputs.num_rows * heads.count * num_parts * (value_dim + 2)
        has_parts = num_parts > 1 and num_numbers <= _MAX_PART_NUMBERS
        has_bounds = bool(inputs.host_counts[HAS_BOUNDS]) and (isinstance(shape, LatentShape) or shape.has_bounds)
        return self._run(
            "Attention",
            type=TYPES[dtype_of(queries)],
            queries=queries,
            cache=_cache(cache, shape),
            block_tables=inputs.block_tables[cache.table],
            tile_slots=inputs.tile_slots,
            tile_contexts=inputs.tile_contexts,
            tile_row_ids=inputs.tile_row_ids,
            row_queries=inputs.row_queries,
            positions=inputs.positions,
            first_keys=inputs.first_keys if has_bounds else None,
            last_keys=inputs.last_keys if has_bounds else None,
            parts=self._make([num_numbers], "float32") if has_parts else None,
            sinks=self._sinks(shape),
            scale=scale,
            softcap=0.0 if isinstance(shape, LatentShape) else shape.softcap,
            num_rows=inputs.num_rows,
            num_tiles=inputs.num_tiles,
            tile_rows=inputs.tile_rows,
            num_parts=num_parts,
            blocks_per_slot=inputs.block_tables[cache.table].shape[1],
            heads=heads.count,
            kv_heads=heads.kv_count,
            first_kv=cache.first_head + heads.first_kv,
            window=window,
            has_chunks=not isinstance(shape, LatentShape) and shape.has_chunks,
            is_two_sided=not isinstance(shape, LatentShape) and shape.is_two_sided,
            is_latent=is_latent,
        )["output"]


__all__ = ["INTEGERS", "KV_TYPES", "CudaOps", "array_on", "describe", "make_table"]
