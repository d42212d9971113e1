"""Layout of adapters in memory, and which linears of a model they can change. Pure.

An adapter adds a product of rank r to some linears y = x W + b: y = x W + b + (x A^T) B^T * scale. All adapters of an engine
are in one arena, held by the supervisor and mapped by every rank, in slots of equal size. So a restarted rank finds them
unchanged:

    ranks     int32 [slots][modules]               rows of A in use; 0: the adapter leaves the module as it is
    writes    int32 [slots]                        how often an adapter was written to the slot
    slot 0    float32 [module][A | B]              the linears of experts last: most adapters have none
    slot 1    ...

    A         [inputs][padded rank]                transposed: a row's products with all of A are computed side by side
    B         [panels of 16 outputs][rank][16]     multiplied by the scale

The rank is padded to whole lines of 16 with zeros, and so is the last panel. A and B begin where they would with the largest
rank. Pages of a slot are allocated when they are first written, so experts, which have pages of their own, cost memory only for
adapters that change them. The gate, up and down of an expert follow each other, and so do the experts of a layer: the native op
computes their offsets.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.families.family import Latents
from engine.checkpoint.families.recurrence import Recurrence
from engine.checkpoint.joined_projections import JoinedProjection, joined_projections
from engine.checkpoint.model_config import ModelConfig

LINE = 16  # float32 values of a cache line: ranks, and outputs, that are computed side by side
_PAGE_BYTES = 1 << 16  # the largest of any machine


class AdaptedModule(msgspec.Struct, frozen=True):
    """A linear of the checkpoint, by its own name. `a` and `b`: offsets of its matrices in a slot, in floats."""

    name: str
    index: int  # column in the table of ranks
    num_inputs: int
    num_outputs: int
    a: int
    b: int


class StackShape(msgspec.Struct, frozen=True):
    """How transformers stacks the experts of a layer: [experts, outputs, inputs], or [experts, inputs, outputs] if
    `is_turned`."""

    num_experts: int
    hidden: int
    inner: int
    is_turned: bool
    is_marked: bool  # transformers marks the turned ones, and PEFT does not swap their A and B
    is_interleaved: bool  # gate and up have alternating outputs

    @staticmethod
    def of(config: ModelConfig) -> StackShape | None:
        """None: the model has no experts, or several sets of them, which are not stacked, or they have no gates."""
        experts, family = config.experts, FAMILIES[config.architecture]
        if experts is None or config.vision_experts is not None or family.plain_mlp_names:
            return None
        is_marked = family.has_interleaved_experts
        is_turned = family.has_turned_experts or is_marked
        inner = experts.intermediate_size
        return StackShape(experts.num_experts, config.hidden_size, inner, is_turned, is_marked, is_marked)

    def sizes(self, parameter: str) -> tuple[int, int]:
        """Return inputs and outputs."""
        return (self.hidden, 2 * self.inner) if parameter == "gate_up_proj" else (self.inner, self.hidden)


class AdapterLayout(msgspec.Struct, frozen=True):
    """Memory layout for `num_slots` adapters of at most rank `max_rank`."""

    modules: tuple[AdaptedModule, ...]
    num_slots: int
    max_rank: int
    slot_floats: int
    dense_floats: int  # of these, before the experts
    stack: StackShape | None = None  # of the experts
    joined: tuple[JoinedProjection, ...] = ()  # linears that an adapter's file has as one

    @staticmethod
    def of(config: ModelConfig, num_slots: int, max_rank: int) -> AdapterLayout:
        modules: list[AdaptedModule] = []
        ends, at, room = [], 0, whole_lines(max_rank)
        for linears in (_linears(config), _of_experts(config)):
            for name, num_inputs, num_outputs in linears:
                end_of_a = at + num_inputs * room
                modules.append(AdaptedModule(name, len(modules), num_inputs, num_outputs, at, end_of_a))
                at = end_of_a + whole_lines(num_outputs) * room
            at = _whole_pages(4 * at) // 4
            ends.append(at)
        return AdapterLayout(
            tuple(modules), num_slots, max_rank, at, ends[0], StackShape.of(config), joined_projections(config)
        )

    @property
    def table_bytes(self) -> int:
        return _whole_pages(4 * self.num_slots * (len(self.modules) + 1))

    @property
    def num_bytes(self) -> int:
        return self.table_bytes + 4 * self.num_slots * self.slot_floats

    @property
    def expert_bytes(self) -> int:
        """Bytes of `num_bytes` that are used by adapters of experts alone."""
        return 4 * self.num_slots * (self.slot_floats - self.dense_floats)


def why_not_adaptable(config: ModelConfig) -> str:
    """Return why a model cannot have adapters; empty if it can."""
    has_others = config.recurrence is not None or config.attention_layers is not None
    if has_others and not FAMILIES[config.architecture].recurrent_module:
        return "they have recurrent layers of another kind than those that can be adapted"
    return "they are encoders" if config.position_tables is not None else ""


def whole_lines(count: int) -> int:
    return -(-count // LINE) * LINE


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _linears(config: ModelConfig) -> list[tuple[str, int, int]]:
    """Return name, inputs and outputs of each linear but those of experts, layer by layer: attention or what is in its place,
    the MLP or that beside experts, and the router."""
    if why_not_adaptable(config):
        return []
    return [
        (f"model.layers.{layer}.{name}", num_inputs, num_outputs)
        for layer in range(config.num_layers)
        for name, num_inputs, num_outputs in (*_before_mlp(config, layer), *_of_mlp(config, layer))
    ]


def _has_mlp(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has an MLP or experts. In families without an inner norm layers have one part each."""
    recurrent = config.recurrence.layers if config.recurrence is not None else ()
    attention = config.attention_layers
    return bool(FAMILIES[config.architecture].norm_names.inner) or attention is None or layer not in {*attention, *recurrent}


def _before_mlp(config: ModelConfig, layer: int) -> Iterator[tuple[str, int, int]]:
    if config.attention_layers is None or layer in config.attention_layers:
        yield from _of_attention(config, layer)
    if config.recurrence is not None and layer in config.recurrence.layers:
        module = FAMILIES[config.architecture].recurrent_module
        for name, num_inputs, num_outputs in _of_recurrence(config.recurrence, config.hidden_size):
            yield f"{module}.{name}", num_inputs, num_outputs


def _of_recurrence(sizes: Recurrence, hidden: int) -> list[tuple[str, int, int]]:
    channels, width, heads = sizes.channels, sizes.values_width, sizes.num_value_heads
    if sizes.kind == "convolution":
        return [("in_proj", hidden, 3 * channels), ("out_proj", channels, hidden)]
    if sizes.kind == "state spaces":
        inputs = [("in_proj", hidden, width + channels), ("dt_proj", hidden, heads)]
    else:
        inputs = [("in_proj_qkv", hidden, channels), ("in_proj_z", hidden, width)]
        inputs += [("in_proj_b", hidden, heads), ("in_proj_a", hidden, heads)]
    return [*inputs, ("out_proj", width, hidden)]


def _of_attention(config: ModelConfig, layer: int) -> list[tuple[str, int, int]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.latents is not None:
        return _of_latents(config.latents, hidden, heads)
    sizes = config.layer_shape(layer)
    queries, keys = heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    output = ("self_attn.o_proj", queries, hidden)
    if "qkv_proj" in FAMILIES[config.architecture].fused_names:
        return [("self_attn.qkv_proj", hidden, queries + 2 * keys), output]
    found = [("self_attn.q_proj", hidden, queries)]
    if FAMILIES[config.architecture].has_query_gate:
        found.append(("self_attn.gate_proj", hidden, queries))
    if sizes.source == layer:
        found.append(("self_attn.k_proj", hidden, keys))
        found += [("self_attn.v_proj", hidden, keys)] if sizes.has_value_weights else []
    return [*found, output]


def _of_latents(latents: Latents, hidden: int, heads: int) -> list[tuple[str, int, int]]:
    """Return the linears but for `kv_b_proj`, which is multiplied into queries and results."""
    queries = heads * (latents.plain_dim + latents.rotary_dim)
    found = [("self_attn.q_proj", hidden, queries)]
    if latents.query_dim:
        found = [("self_attn.q_a_proj", hidden, latents.query_dim), ("self_attn.q_b_proj", latents.query_dim, queries)]
    compressed = ("self_attn.kv_a_proj_with_mqa", hidden, latents.latent_dim + latents.rotary_dim)
    return [*found, compressed, ("self_attn.o_proj", heads * latents.value_dim, hidden)]


def _of_mlp(config: ModelConfig, layer: int) -> list[tuple[str, int, int]]:
    if not _has_mlp(config, layer):
        return []
    family, hidden, inner = FAMILIES[config.architecture], config.hidden_size, config.layer_shape(layer).intermediate_size
    sparse = [experts for experts in (config.experts, config.vision_experts) if experts and layer in experts.sparse_layers]
    prefix = family.mlp_name
    if sparse and not family.has_mlp_beside_experts:
        prefix, inner = "mlp.shared_experts", sparse[0].shared_intermediate_size
    *first, last = family.plain_mlp_names or ("gate_proj", "up_proj", "down_proj")
    widths = dict.fromkeys(first, inner)
    if "gate_up_proj" in family.fused_names:
        widths = {"gate_up_proj": 2 * inner}
    found = [(f"{prefix}.{name}", hidden, width) for name, width in widths.items()]
    found = [*found, (f"{prefix}.{last}", inner, hidden)] if inner else []
    if len(sparse) == 1:  # several sets have routers of another form
        found.append(("mlp.gate", hidden, sparse[0].num_experts))
        if latent := sparse[0].latent_size:
            found += [("mlp.fc1_latent_proj", hidden, latent), ("mlp.fc2_latent_proj", latent, hidden)]
    return found


def _of_experts(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Yield the linears of experts. A second set of experts is numbered after the first."""
    if why_not_adaptable(config):
        return
    for layer in range(config.num_layers):
        first = 0
        *parts, last = FAMILIES[config.architecture].plain_mlp_names or ("gate_proj", "up_proj", "down_proj")
        for experts in (config.experts, config.vision_experts):
            if experts is None or layer not in experts.sparse_layers:
                continue
            width, inner = experts.latent_size or config.hidden_size, experts.intermediate_size
            for index in range(first, first + experts.num_experts):
                name = f"model.layers.{layer}.mlp.experts.{index}"
                for part in parts:
                    yield f"{name}.{part}", width, inner
                yield f"{name}.{last}", inner, width
            first += experts.num_experts
