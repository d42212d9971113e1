"""Weights of a model: its modules, declared by name and shape, to be filled from a checkpoint or at random.

A model declares its modules in its constructor. The loader checks all of them against the checkpoint before it reads any, so a
wrong checkpoint is reported completely and costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.checkpoint.families.family import PositionTables
from engine.checkpoint.families.recurrence import Recurrence
from engine.checkpoint.rope_config import RopeConfig
from engine.checkpoint.vision_config import PixelScale
from ops.modules import (
    AttentionShape,
    AxisPositionTables,
    Columns,
    Convolution,
    DeltaRule,
    Embedding,
    EmbeddingPart,
    Experts,
    Factor,
    Factors,
    GateClamp,
    GatedNorm,
    HeadLinear,
    HeadNorm,
    LatentShape,
    LayerNorm,
    Limits,
    Linear,
    LinearPart,
    Norm,
    PatchLinear,
    PositionTable,
    Rotary,
    Router,
    RoutingRule,
    Sinks,
    Standardization,
    StateSpaces,
    TypedPositions,
)
from workers.rank_group.share import TensorShare


class Weights(msgspec.Struct):
    """The modules that one model declared, in order; linears know which of their outputs this rank computes."""

    share: TensorShare = msgspec.field(default_factory=TensorShare)
    norm_offset: float = 0.0  # added to the stored weights of RMSNorms
    linears: list[Linear] = []
    head_linears: list[HeadLinear] = []
    embeddings: list[Embedding] = []
    typed_positions: list[TypedPositions] = []
    norms: list[Norm] = []
    layer_norms: list[LayerNorm] = []
    patch_linears: list[PatchLinear] = []
    position_tables: list[PositionTable] = []
    column_rules: list[Limits | Standardization | Factors] = []
    encoder_linears: list[Linear] = []
    head_norms: list[HeadNorm] = []
    sinks: list[Sinks] = []
    factors: list[Factor] = []
    routers: list[Router] = []
    mixtures: list[Experts] = []
    rotaries: list[tuple[RopeConfig, Rotary]] = []
    exact_linears: list[Linear] = []  # float32 in every precision
    convolutions: list[Convolution] = []
    delta_rules: list[DeltaRule] = []
    state_spaces: list[StateSpaces] = []
    gated_norms: list[GatedNorm] = []

    def linear(
        self,
        names: Sequence[str],
        num_inputs: int,
        num_outputs: Sequence[int],
        has_bias: bool = False,
        columns: Columns | None = None,
    ) -> Linear:
        """Declare projections of the same input, computed as one, with their outputs joined. `columns`: computed by this rank;
        None: its share of each."""
        module = Linear(tuple(names), num_inputs, tuple(num_outputs), has_bias)
        module.columns = self.share.columns(module.num_outputs) if columns is None else columns
        self.linears.append(module)
        return module

    def exact_linear(self, names: Sequence[str], num_inputs: int, num_outputs: Sequence[int], has_bias: bool = False) -> Linear:
        """Declare projections that are float32 in every precision, whole on every rank."""
        module = Linear(tuple(names), num_inputs, tuple(num_outputs), has_bias)
        self.exact_linears.append(module)
        return module

    def convolution(
        self,
        name: str,
        sizes: Recurrence,
        columns: Columns,
        *,
        activation: Literal["silu", ""] = "silu",
        is_gated: bool = False,
    ) -> Convolution:
        module = Convolution(name, sizes.channels, sizes.kernel, sizes.has_bias, activation, is_gated, columns)
        self.convolutions.append(module)
        return module

    def delta_rule(self, name: str, sizes: Recurrence) -> DeltaRule:
        module = DeltaRule(
            (f"{name}.A_log", f"{name}.dt_bias"),
            sizes.num_key_heads,
            sizes.num_value_heads,
            sizes.key_dim,
            sizes.value_dim,
            sizes.is_per_channel,
            own=self.share.recurrent_heads(sizes.num_value_heads, sizes.num_key_heads),
        )
        assert module.log_width == sizes.layer.log_width, "the state arena has another width of a log than the ops"
        self.delta_rules.append(module)
        return module

    def state_space(self, name: str, sizes: Recurrence, least: float, most: float) -> StateSpaces:
        """Declare Mamba-2's recurrence, with the limits of its time steps."""
        module = StateSpaces(
            (f"{name}.A_log", f"{name}.dt_bias", f"{name}.D"),
            sizes.num_value_heads,
            sizes.value_dim,
            sizes.num_key_heads,
            sizes.key_dim,
            least,
            most,
            own=self.share.recurrent_heads(sizes.num_value_heads, sizes.num_key_heads),
        )
        assert module.log_width == sizes.layer.log_width, "the state arena has another width of a log than the ops"
        self.state_spaces.append(module)
        return module

    def gated_norm(
        self, name: str, width: int, group: int, epsilon: float, *, is_shared: bool = True, is_gated_first: bool = False
    ) -> GatedNorm:
        """Declare the norm of runs of `group` numbers. `is_shared`: they have one weight."""
        module = GatedNorm(name, width, group, epsilon, is_shared=is_shared, is_gated_first=is_gated_first)
        self.gated_norms.append(module)
        return module

    def linear_parts(self, name: str, num_inputs: int, num_outputs: int) -> tuple[Linear, Linear]:
        """Declare one linear over two tensors side by side, `num_inputs` wide each, as two linears whose results are added.
        Whole on every rank: a gathered tensor is overwritten before the second has its result."""
        first, second = (
            LinearPart(
                (name,),
                num_inputs,
                (num_outputs,),
                first_input=first,
                stored_inputs=2 * num_inputs,
                stored_outputs=num_outputs,
            )
            for first in (0, num_inputs)
        )
        self.linears += [first, second]
        return first, second

    def linear_outputs(self, name: str, num_inputs: int, num_outputs: int, count: int) -> list[LinearPart]:
        """Declare one linear as `count` linears with `num_outputs` outputs each. Whole on every rank."""
        parts = [
            LinearPart(
                (name,),
                num_inputs,
                (num_outputs,),
                stored_inputs=num_inputs,
                first_output=index * num_outputs,
                stored_outputs=count * num_outputs,
            )
            for index in range(count)
        ]
        self.linears += parts
        return parts

    def encoder_linear(
        self, names: Sequence[str], num_inputs: int, num_outputs: Sequence[int], *, has_bias: bool = True
    ) -> Linear:
        """Declare a linear of an encoder, whole on every rank, because ranks divide pictures instead."""
        module = Linear(tuple(names), num_inputs, tuple(num_outputs), has_bias=has_bias)
        self.encoder_linears.append(module)
        return module

    def patch_linear(
        self,
        name: str,
        stored_shape: tuple[int, ...],
        stored_frames: int,
        frames: int,
        pixels: PixelScale,
        has_bias: bool,
        *,
        are_channels_last: bool = False,
    ) -> PatchLinear:
        num_outputs, num_inputs = stored_shape[0], math.prod(stored_shape[1:]) // stored_frames * frames
        module = PatchLinear(
            (name,),
            num_inputs,
            (num_outputs,),
            has_bias=True,
            stored_shape=stored_shape,
            frames=frames,
            stored_frames=stored_frames,
            factor=pixels.factor,
            means=pixels.means,
            deviations=pixels.deviations,
            has_stored_bias=has_bias,
            are_channels_last=are_channels_last,
        )
        self.patch_linears.append(module)
        return module

    def layer_norm(self, name: str, width: int, epsilon: float, *, has_bias: bool = True) -> LayerNorm:
        module = LayerNorm(name, width, epsilon, has_bias)
        self.layer_norms.append(module)
        return module

    def position_table(self, name: str, side: int, width: int, has_aligned_corners: bool) -> PositionTable:
        module = PositionTable(name, side, width, has_aligned_corners)
        self.position_tables.append(module)
        return module

    def axis_positions(self, name: str, num_places: int, width: int) -> AxisPositionTables:
        module = AxisPositionTables(name, num_places, width)
        self.position_tables.append(module)
        return module

    def limits(self, names: Sequence[str], side: Literal["input", "output"], widths: Sequence[int]) -> Limits:
        """Declare the limits of the inputs or outputs of these linears, side by side."""
        module = Limits("+".join(f"{name}.{side}" for name in names), tuple(widths), names=tuple(names), side=side)
        self.column_rules.append(module)
        return module

    def column_factors(self, name: str, spans: Sequence[tuple[int, float]]) -> Factors:
        """Declare constant factors, which no checkpoint has, of spans of columns: the columns of each, and their factor."""
        module = Factors(name, (sum(count for count, _ in spans),), spans=tuple(spans))
        self.column_rules.append(module)
        return module

    def standardization(self, name: str, width: int, factor: float) -> Standardization:
        module = Standardization(name, (width,), factor=factor)
        self.column_rules.append(module)
        return module

    def head_linear(
        self, name: str, shape: LatentShape, rows_of_head: int, rows: range, *, is_turned: bool = False
    ) -> HeadLinear:
        """Declare the `rows` of each head in a linear [num_heads * rows_of_head, latent_dim]."""
        heads = shape.heads
        own = range(heads.first, heads.first + heads.count)
        module = HeadLinear(name, shape.num_heads, rows_of_head, rows, shape.latent_dim, is_turned, own=own)
        self.head_linears.append(module)
        return module

    def embedding(self, name: str, num_rows: int, width: int) -> Embedding:
        module = Embedding(name, num_rows, width)
        self.embeddings.append(module)
        return module

    def embedding_columns(self, name: str, num_rows: int, width: int, count: int) -> list[EmbeddingPart]:
        """Declare one table as `count` tables with `width` columns each."""
        parts = [
            EmbeddingPart(
                f"{name}.{index}",
                num_rows,
                width,
                stored_name=name,
                first_column=index * width,
                stored_width=count * width,
            )
            for index in range(count)
        ]
        self.embeddings += parts
        return parts

    def positions(self, name: str, types_name: str, own: PositionTables, num_positions: int, width: int) -> TypedPositions:
        """Declare learned rows of positions and of text types, as one table."""
        module = TypedPositions(
            name,
            own.num_token_types * num_positions,
            width,
            types_name=types_name,
            num_types=own.num_token_types,
            first_row=own.first_position,
            num_stored_rows=own.num_position_rows,
        )
        self.typed_positions.append(module)
        return module

    def norm(self, name: str, width: int, epsilon: float, *, has_weight: bool = True, head_dim: int = 0) -> Norm:
        module = Norm(name, width, epsilon, self.norm_offset, has_weight, head_dim)
        self.norms.append(module)
        return module

    def head_norm(
        self,
        query_name: str,
        key_name: str,
        shape: AttentionShape,
        epsilon: float,
        *,
        is_after_rotation: bool = False,
        has_weight: bool = True,
        has_values: bool = False,
    ) -> HeadNorm:
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        module = HeadNorm(query_name, key_name, *sizes, epsilon, self.norm_offset, is_after_rotation, has_weight, has_values)
        self.head_norms.append(module)
        return module

    def factor(self, name: str) -> Factor:
        module = Factor(name)
        self.factors.append(module)
        return module

    def attention_sinks(self, name: str, num_heads: int) -> Sinks:
        module = Sinks(name, num_heads)
        self.sinks.append(module)
        return module

    def router(
        self,
        name: str,
        num_inputs: int,
        num_experts: int,
        rule: RoutingRule,
        correction_name: str,
        correction_shape: tuple[int, ...],
        set: int | None = None,
        has_bias: bool = False,
        scales_name: str = "",
    ) -> Router:
        """Declare a router. Each of several sets has a tensor, `weight`, `weight_1` and so on, [inputs, experts], and a row of
        the correction."""
        module = Router(Linear((name,), num_inputs, (num_experts,), has_bias), rule, correction_name, correction_shape)
        if set is not None:
            module.set, module.weight_name = set, f"{name}.weight_{set}" if set else f"{name}.weight"
            module.linear.names = (f"{name}_{set}",)
        module.scales_name = scales_name
        self.routers.append(module)
        return module

    def experts(
        self,
        name: str,
        num_experts: int,
        num_inputs: int,
        inner: int,
        first: int = 0,
        is_local: bool = False,
        has_bias: bool = False,
        clamp: GateClamp | None = None,
        is_gated: bool = True,
    ) -> Experts:
        """Declare the experts from number `first` on. Sets after the first are not divided among ranks, nor are experts with
        `is_local`. Without `is_gated` they are down(activation(up))."""
        gate_up, down = [], []
        parts = ("gate_proj", "up_proj") if is_gated else ("up_proj",)
        gate_up_columns, down_columns = self.share.expert_columns((inner,) * len(parts), num_inputs)
        for index in range(first, first + num_experts):
            names, last = tuple(f"{name}.{index}.{part}" for part in parts), f"{name}.{index}.down_proj"
            gate_up.append(Linear(names, num_inputs, (inner,) * len(parts), has_bias, columns=gate_up_columns))
            down.append(Linear((last,), inner, (num_inputs,), has_bias, columns=down_columns))
        name = f"{name}.{first}" if first else name
        module = Experts(name, tuple(gate_up), tuple(down), clamp, is_local=is_local or first > 0)
        self.mixtures.append(module)
        return module

    def rotary(self, rope: RopeConfig, head_dim: int) -> Rotary:
        """Declare rotary tables, which no checkpoint has: computed for as many positions as the engine serves, or for the rows
        of each step."""
        module = Rotary(head_dim, is_by_row=bool(rope.mrope_sections), is_constant=not rope.rotary_dim)
        self.rotaries.append((rope, module))
        return module

    def formatted(self) -> list[Sequence[Linear]]:
        """Return the linears grouped by common format: single ones, and those of a mixture's experts together."""
        alone = [*self.linears, *self.encoder_linears]
        return [*([linear] for linear in alone), *(part for mixture in self.mixtures for part in mixture.parts.values())]

    def all_linears(self) -> list[Linear]:
        routers = (router.linear for router in self.routers if not router.weight_name)
        return [*routers, *self.exact_linears, *(linear for group in self.formatted() for linear in group)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that a checkpoint must have, by Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for embedding in self.embeddings:
            shapes[f"{stored_name(embedding)}.weight"] = (embedding.num_rows, stored_width(embedding))
        for positions in self.typed_positions:
            shapes[f"{positions.name}.weight"] = (positions.num_stored_rows, positions.width)
            shapes[f"{positions.types_name}.weight"] = (positions.num_types, positions.width)
        for norm in (norm for norm in self.norms if norm.has_weight):
            shapes[f"{norm.name}.weight"] = norm.stored_shape
        for layer_norm in self.layer_norms:
            names = [f"{layer_norm.name}.{part}" for part in (("weight", "bias") if layer_norm.has_bias else ("weight",))]
            shapes |= dict.fromkeys(names, (layer_norm.width,))
        for table in self.position_tables:
            shapes[f"{table.name}.weight"] = table.shape
        for rules in self.column_rules:
            if isinstance(rules, Limits):
                shapes |= {name: () for names in rules.stored_names for name in names}
            elif isinstance(rules, Standardization):
                shapes |= dict.fromkeys(rules.stored_names, (rules.width,))
        for patches in self.patch_linears:
            (name,) = patches.names
            shapes[f"{name}.weight"] = patches.stored_shape
            if patches.has_stored_bias:
                shapes[f"{name}.bias"] = patches.num_outputs
        for head_norm in (norm for norm in self.head_norms if norm.has_weight):
            stored = filter(None, (head_norm.query_name, head_norm.key_name))
            shapes |= {f"{name}.weight": (head_norm.width,) for name in stored}
        shapes |= {router.correction_name: router.correction_shape for router in self.routers if router.correction_name}
        shapes |= {router.scales_name: (router.num_experts,) for router in self.routers if router.scales_name}
        shapes |= {f"{sinks.name}.weight": (sinks.num_heads,) for sinks in self.sinks}
        shapes |= {f"{factor.name}.weight": (1,) for factor in self.factors}
        for convolution in self.convolutions:
            channels = convolution.channels // len(convolution.stored_names)
            for name in convolution.stored_names:
                shapes[f"{name}.weight"] = (channels, 1, convolution.kernel)
                shapes |= {f"{name}.bias": (channels,)} if convolution.has_bias else {}
        for rule in self.delta_rules:
            of_decay, of_bias = rule.names
            shapes |= {of_decay: rule.rates_shape, of_bias: (rule.num_value_heads * rule.num_decays,)}
        shapes |= {name: (spaces.num_heads,) for spaces in self.state_spaces for name in spaces.names}
        shapes |= {f"{norm.name}.weight": (norm.weight_width,) for norm in self.gated_norms}
        for router in self.routers:
            if router.weight_name:
                shapes[router.weight_name] = (router.linear.num_inputs, router.num_experts)
        for linear in self.all_linears():
            for name, num_outputs in zip(linear.names, linear.num_outputs, strict=True):
                shapes[f"{name}.weight"] = (stored_outputs(linear) or num_outputs, stored_inputs(linear))
            shapes |= {name: (num_outputs,) for name, num_outputs in zip(linear.bias_names, linear.num_outputs, strict=False)}
        for part in self.head_linears:
            shapes[f"{part.name}.weight"] = (part.num_heads * part.rows_of_head, part.num_columns)
        return shapes


def stored_inputs(linear: Linear) -> int:
    """Return the linear's inputs in the checkpoint."""
    return linear.stored_inputs if isinstance(linear, LinearPart) else linear.num_inputs


def stored_outputs(linear: Linear) -> int:
    """Return the outputs of a linear's tensor in the checkpoint; 0: those of each name."""
    return linear.stored_outputs if isinstance(linear, LinearPart) else 0


def stored_name(embedding: Embedding) -> str:
    return embedding.stored_name if isinstance(embedding, EmbeddingPart) else embedding.name


def stored_width(embedding: Embedding) -> int:
    return embedding.stored_width if isinstance(embedding, EmbeddingPart) else embedding.width
