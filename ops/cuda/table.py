"""The op table of CUDA's rows; other ops are those of the reference, in Paddle.

Tensors are Paddle's, on the card, or on the CPU for emulated rows. Activations are float32; weights are float32, or int8, int4
and float4 as stored in a checkpoint or as rounded by the native table; keys and values may have any type of `operands.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import paddle

from ops.cpu.int_packing import rounded
from ops.cuda.library import Library
from ops.cuda.operands import TYPES, bound
from ops.modules import (
    AttentionShape,
    Columns,
    Embedding,
    Experts,
    HeadNorm,
    KvCache,
    LatentShape,
    LayerCache,
    Linear,
    Module,
    Norm,
    Router,
)
from ops.paddle import reference
from ops.paddle.metadata import InPlace
from ops.paddle.rank_group import ExpertOps, RankGroupOps
from ops.table import HAS_BOUNDS, KEY_SPLIT, AttentionMetadata, DeviceSampler, Inputs, OpTable, Routing, StepInputs
from ops.weight_format import QuantizedWeight, Source, Store, Values, WeightFormat, float32

KV_TYPES = ("float32", "float16", "bfloat16", "int8", "float8")
INTEGERS = ("int8", "int4", "float4")  # kinds of weights
KEYS_OF_PART = 512  # PART in attention.cu
_STEP = 32  # inputs of a linear come in multiples of it
_TILE_ROWS = 16  # rows of an expert's tile, TILE_ROWS in linear.h
_MAX_PART_NUMBERS = 1 << 24  # scratch memory for parts of attention; beyond it, one block computes all parts of a row


class PackedLinear(NamedTuple):
    """Weights of a rank's outputs."""

    values: paddle.Tensor
    scales: paddle.Tensor | None
    offsets: paddle.Tensor | None
    type: str
    num_inputs: int
    padded_inputs: int
    num_outputs: int
    group_size: int

    def operands(self) -> dict[str, Any]:
        """Return `Weights` of operands.h."""
        return {**self._asdict(), "type": TYPES[self.type]}


class PackedExperts(NamedTuple):
    """Weights of all experts, one after another."""

    gate_up: PackedLinear
    down: PackedLinear
    gate_up_bias: paddle.Tensor | None  # [experts, num_outputs]
    down_bias: paddle.Tensor | None

    def arrays(self) -> tuple[()]:
        """Return no arrays: nothing has to be faulted in when an expert moves to a rank."""
        return ()


class Angles(NamedTuple):
    """Operands with these names."""

    angle_rows: paddle.Tensor
    cosines: paddle.Tensor
    sines: paddle.Tensor
    partners: paddle.Tensor


class Step(NamedTuple):
    inputs: AttentionMetadata
    block_size: int


def make_table(library: Library, stream: Callable[[], int] = lambda: 0, rank_group: RankGroupOps | None = None) -> OpTable:
    """Return the table. `stream`: returns the address of Paddle's current stream. `rank_group`: the exchanges of several
    ranks."""
    rows = _Rows(library, stream, rank_group)
    table = msgspec.structs.replace(
        reference.TABLE,
        name="cuda",
        pack=pack,
        integer_kinds=INTEGERS,
        cache_view=lambda memory, block_size: memory,
        clear_block=clear_block,
        drawing=DeviceSampler(rows.draw, is_greedy=False),
        sync_free_ops={},
        begin=rows.begin,
        take_features=lambda step, x, number: reference.take_features(cast(Any, step), x, number),
        linear=rows.linear,
        rotary_angles=rotary_angles,
        rotate_and_store=rows.rotate_and_store,
        attention=rows.attention,
        keep_rows=keep_rows,
        store_latent=rows.store_latent,
        latent_attention=rows.latent_attention,
        route=rows.route,
        experts=rows.experts,
    )
    if rank_group is None:
        return table
    return rank_group.over(
        table, ExpertOps(rows.experts, rows.experts, rows.expert_products, rows.combine, rows.chosen_of_some)
    )


# ------------------------------------------------------------------------------------------------------- weights and cache


def pack(module: Module, sources: Mapping[str, Source], store: Store) -> None:
    """Pack linears for the rows, and modules of reference ops as the reference does."""
    match module:
        case Linear():
            module.weight = _packed(sources["weight"](), module)
            if "bias" in sources:
                module.bias = paddle.to_tensor(_own(float32(sources["bias"]()), module.columns))
        case HeadNorm():  # all queries have the same weight, and so have all keys
            values = [float32(sources[name]()).reshape(-1) for name in ("queries", "keys")]
            module.weight = paddle.to_tensor(np.stack([*values, np.ones_like(values[0])]))
        case Router():
            module.linear.weight = _packed(sources["weight"](), module.linear)
            if "bias" in sources:
                module.linear.bias = paddle.to_tensor(float32(sources["bias"]()))
            if "correction" in sources:
                module.correction = paddle.to_tensor(float32(sources["correction"]()).reshape(-1))
            if "scales" in sources:
                module.scales = paddle.to_tensor(float32(sources["scales"]()))
        case Experts():
            parts = {
                part: _stacked([_packed(sources[f"{part}.{index}"](), linear) for index, linear in enumerate(linears)])
                for part, linears in module.parts.items()
            }
            biases = {name: float32(source()) for name, source in sources.items() if name.endswith(".bias")}
            of_each = [reference.stacked_biases(module, part, biases) for part in parts]
            module.weight = PackedExperts(parts["gate_up"], parts["down"], *of_each)
        case Embedding():  # uses the head's weights, if they are one matrix
            numbers = _in_format(sources["weight"](), module.format, None if module.tied is None else module.tied.importances)
            reference.pack(module, {"weight": lambda: numbers}, store)
        case _:
            reference.pack(module, sources, store)


def _in_format(values: Values, format: WeightFormat, importances: np.ndarray | None) -> Values:
    """Round floats if the format has integers."""
    return rounded(values, format, importances) if isinstance(values, np.ndarray) and format.kind in INTEGERS else values


def _stacked(linears: list[PackedLinear]) -> PackedLinear:
    """Stack the linears of experts, which have the same shape and format."""

    def joined(part: str) -> paddle.Tensor | None:
        tensors = [getattr(linear, part) for linear in linears]
        return None if tensors[0] is None else paddle.concat(tensors)

    return linears[0]._replace(
        values=paddle.concat([linear.values for linear in linears]), scales=joined("scales"), offsets=joined("offsets")
    )


def _own(values: np.ndarray, columns: Columns) -> np.ndarray:
    return np.concatenate([values[begin:end] for begin, end in columns]) if columns else values


def _packed(values: Values, module: Linear) -> PackedLinear:
    columns, format = module.columns, module.format
    scales = offsets = None
    values = _in_format(values, format, module.importances)
    if isinstance(values, QuantizedWeight):
        kind, integers = values.format.kind, _own(values.values, columns)
        num_inputs = integers.shape[1]
        group = values.format.group_size or -(-num_inputs // _STEP) * _STEP
        padded_inputs = -(-num_inputs // math.lcm(group, _STEP)) * math.lcm(group, _STEP)
        by_group = _own(values.scales, columns)
        if values.multipliers is not None:
            by_group = by_group * _own(values.multipliers, columns)
        missing = (0, 0), (0, padded_inputs // group - by_group.shape[1])
        scales = paddle.to_tensor(np.pad(by_group, missing).astype(np.float32))
        if values.offsets is not None:
            offsets = paddle.to_tensor(np.pad(_own(values.offsets, columns), missing))
        zero = 8 if kind == "int4" and offsets is None else 0
        padded = np.pad(integers, ((0, 0), (0, padded_inputs - num_inputs)), constant_values=zero)
        if kind in ("int4", "float4"):
            memory = (padded[:, ::2] | padded[:, 1::2] << 4).astype(np.uint8)
        else:
            memory = padded.astype(np.int8).view(np.uint8)
        return PackedLinear(paddle.to_tensor(memory), scales, offsets, kind, num_inputs, padded.shape[1], len(padded), group)
    own = _own(float32(values), columns)
    padded = np.ascontiguousarray(np.pad(own, ((0, 0), (0, -own.shape[1] % _STEP))))
    memory = paddle.to_tensor(padded.view(np.uint8))
    return PackedLinear(memory, None, None, "float32", own.shape[1], padded.shape[1], len(own), _STEP)


def clear_block(cache: KvCache, block: int) -> None:
    for layer in cache.layers:
        layer.keys[block] = 0
        layer.values[block] = 0


# -------------------------------------------------------------------------------------------------------------- the rows


def rotary_angles(inputs: Inputs, module: Any) -> Angles:
    if module.is_by_row:
        return Angles(inputs.row_numbers, inputs.row_cosines, inputs.row_sines, module.partners)
    return Angles(inputs.positions, module.cosines, module.sines, module.partners)


def keep_rows(step: Step, *tensors: paddle.Tensor) -> tuple[Any, ...]:
    kept = cast(StepInputs, step.inputs).kept
    row_ids = kept.row_ids[: kept.num_rows]
    return Step(kept, step.block_size), *(paddle.gather(x, row_ids) for x in tensors)


def describe(tensor: paddle.Tensor) -> tuple[int, int]:
    """Return address and size in bytes of a tensor."""
    assert tensor.is_contiguous(), "the tensor must be contiguous"
    return tensor.data_ptr(), tensor.size * tensor.element_size()


def make(shape: tuple[int, ...], dtype: str) -> paddle.Tensor:
    return paddle.empty(shape, cast(Any, dtype))


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


class _Rows:
    def __init__(self, library: Library, stream: Callable[[], int], rank_group: RankGroupOps | None) -> None:
        self._library = library
        self._stream = stream
        self._rank_group = rank_group

    def _run(self, row: str, **values: Any) -> dict[str, paddle.Tensor]:
        """Run a row and return the results that are not given."""
        filled, made = bound(row, describe, make, values)
        self._library.run(row, filled, self._stream())
        return made

    def begin(self, inputs: Inputs, cache: KvCache) -> Step:
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

    def draw(self, inputs: StepInputs, logits: paddle.Tensor) -> paddle.Tensor:
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

    def linear(self, x: paddle.Tensor, module: Linear) -> paddle.Tensor | reference.Cut:
        packed: PackedLinear = module.weight
        x = reference.own_columns(x)
        weights = packed.operands()
        y = self._run("Linear", type=TYPES["float32"], x=x, weights=weights, bias=module.bias, num_rows=x.shape[0])["y"]
        return reference.Cut(y, module.columns[0][0], module.width) if module.columns else y

    def route(self, step: Step, x: paddle.Tensor, module: Router) -> Routing:
        logits, rule = reference.own_columns(self.linear(x, module.linear)), module.rule
        chosen = self._run(
            "Route",
            logits=logits,
            correction=module.correction,
            scales=module.scales,
            expert_sets=None if module.set is None else step.inputs.expert_sets,
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
        return Routing(chosen["ids"], chosen["weights"])

    def experts(
        self, x: paddle.Tensor, routing: Routing, module: Experts, activation: str, shared: paddle.Tensor | None = None
    ) -> paddle.Tensor | reference.Cut:
        num_chosen, packed = routing.ids.shape[1], module.weight
        lists = self._dispatch(routing.ids, module.num_experts)
        both = self._expert_linear(x, packed, "gate_up", lists, num_chosen)
        if not module.is_cut:
            activated = reference.own_columns(reference.activate_and_multiply(both, activation, module.clamp))
            return self.combine(self._expert_linear(activated, packed, "down", lists, 1), routing, shared)
        assert self._rank_group is not None, "experts are split, but there is no rank group for the other columns"
        results = self._expert_linear(self._rank_group.activated(both, module, activation), packed, "down", lists, 1)
        ((begin, _),) = module.down[0].columns
        return reference.Cut(self.combine(results, routing, shared), begin, module.num_inputs)

    def expert_products(self, x: paddle.Tensor, rows: np.ndarray, ids: np.ndarray, module: Experts, part: str) -> paddle.Tensor:
        """Return [n, out]: row rows[i] of x times the weights of a part of expert ids[i], plus its bias; zeros for -1."""
        own, of_experts = (paddle.to_tensor(each.astype(np.int32)) for each in (rows, ids))
        lists = self._dispatch(of_experts, module.num_experts)
        return self._expert_linear(paddle.gather(x, own), module.weight, part, lists, 1)

    def chosen_of_some(
        self, x: paddle.Tensor, ids: paddle.Tensor, module: Experts, activation: str, experts: range
    ) -> paddle.Tensor:
        """Return [R * chosen, hidden] by `experts`; zeros for choices of others."""
        is_own = (ids >= experts.start) & (ids < experts.stop)
        lists = self._dispatch(paddle.where(is_own, ids, paddle.full_like(ids, -1)), module.num_experts)
        both = self._expert_linear(x, module.weight, "gate_up", lists, ids.shape[1])
        activated = reference.own_columns(reference.activate_and_multiply(both, activation, module.clamp))
        return self._expert_linear(activated, module.weight, "down", lists, 1)

    def combine(self, results: paddle.Tensor, routing: Routing, shared: paddle.Tensor | None) -> paddle.Tensor:
        rows, num_chosen = routing.ids.shape
        return self._run(
            "Combine",
            type=TYPES["float32"],
            results=results,
            shared=shared,
            ids=routing.ids,
            weights=routing.weights,
            num_rows=rows,
            num_chosen=num_chosen,
            width=results.shape[1],
        )["y"]

    def _dispatch(self, ids: paddle.Tensor, num_experts: int) -> dict[str, paddle.Tensor]:
        num_choices = int(ids.size)
        max_tiles = num_choices // _TILE_ROWS + num_experts
        return self._run("Dispatch", ids=ids, num_choices=num_choices, num_experts=num_experts, max_tiles=max_tiles)

    def _expert_linear(
        self, x: paddle.Tensor, experts: PackedExperts, part: str, lists: dict[str, paddle.Tensor], x_divisor: int
    ) -> paddle.Tensor:
        """Run a linear of experts; rows of choices without an expert are zeros."""
        packed: PackedLinear = getattr(experts, part)
        y = paddle.zeros([len(lists["choices"]), packed.num_outputs])
        self._run(
            "ExpertLinear",
            type=TYPES["float32"],
            x=x,
            y=y,
            **lists,
            weights=packed.operands(),
            bias=getattr(experts, f"{part}_bias"),
            max_tiles=len(lists["tile_experts"]),
            x_divisor=x_divisor,
        )
        return y

    def rotate_and_store(
        self,
        inputs: Inputs,
        qkv: paddle.Tensor | reference.Cut,
        angles: Angles,
        norm: HeadNorm | None,
        shape: AttentionShape,
        cache: LayerCache,
    ) -> paddle.Tensor:
        heads = shape.heads
        return self._run(
            "RotateAndStore",
            type=TYPES["float32"],
            qkv=reference.own_columns(qkv),
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
        queries: paddle.Tensor | reference.Cut,
        compressed: paddle.Tensor,
        angles: Angles,
        norm: Norm,
        shape: LatentShape,
        cache: LayerCache,
    ) -> paddle.Tensor:
        return self._run(
            "StoreLatent",
            type=TYPES["float32"],
            queries=reference.own_columns(queries),
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

    def attention(
        self, step: Step, queries: paddle.Tensor, shape: AttentionShape, cache: LayerCache
    ) -> paddle.Tensor | reference.Cut:
        output = self._attend(
            step, queries, cache, shape, shape.head_dim, shape.score_scale, shape.sliding_window, is_latent=False
        )
        return output if shape.own is None else reference.Cut(output, shape.own.first * shape.head_dim, shape.queries_width)

    def latent_attention(
        self,
        step: Step,
        absorbed: paddle.Tensor | reference.Cut,
        queries: paddle.Tensor,
        shape: LatentShape,
        cache: LayerCache,
    ) -> paddle.Tensor:
        heads = [queries.shape[0], shape.heads.count, -1]
        rotated = queries.reshape(heads)[..., shape.plain_dim :]
        both = paddle.concat([reference.own_columns(absorbed).reshape(heads), rotated], axis=-1).reshape([heads[0], -1])
        return self._attend(step, both, cache, shape, shape.latent_dim, shape.scale, 0, is_latent=True)

    @staticmethod
    def _sinks(shape: AttentionShape | LatentShape) -> paddle.Tensor | None:
        """Return the sinks of this rank's heads."""
        if isinstance(shape, LatentShape) or shape.sinks is None:
            return None
        own: paddle.Tensor = shape.sinks.weight[shape.heads.first : shape.heads.first + shape.heads.count]
        return own.contiguous()

    def _attend(
        self,
        step: Step,
        queries: paddle.Tensor,
        cache: LayerCache,
        shape: AttentionShape | LatentShape,
        value_dim: int,
        scale: float,
        window: int,
        *,
        is_latent: bool,
    ) -> paddle.Tensor:
        inputs, heads = step.inputs, shape.heads
        num_parts = -(-inputs.num_key_splits * KEY_SPLIT // KEYS_OF_PART)
        num_numbers = inputs.num_rows * heads.count * num_parts * (value_dim + 2)
        has_parts = num_parts > 1 and num_numbers <= _MAX_PART_NUMBERS
        has_bounds = bool(inputs.host_counts[HAS_BOUNDS]) and (isinstance(shape, LatentShape) or shape.has_bounds)
        return self._run(
            "Attention",
            type=TYPES["float32"],
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
            parts=paddle.empty([num_numbers]) if has_parts else None,
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
