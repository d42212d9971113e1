"""Base of the encoders: layers of attention and an MLP over the patches of some pictures. Straight-line against the op table,
like the models. A family's file has the names of its weights, its norms and MLPs, and its merging of patches.

Patches attend only to their picture, or to their window in it, so that many pictures can be computed at once without affecting
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine.checkpoint.vision_config import VisionConfig
from ops.modules import (
    AttentionShape,
    HeadNorm,
    LayerCache,
    LayerNorm,
    Linear,
    Norm,
    PatchLinear,
    PositionTable,
    Tensor,
)
from ops.table import OpTable
from ops.weight_format import WeightFormat
from workers.weights.declaration import Weights


class SliceRows(Protocol):
    """Rows of a slice (`workers/extensions/media/encoder_inputs.py`)."""

    pictures: Any  # `ops.table.Inputs` of the segments: whole pictures, or windows
    windows: Any

    def merged(self, ops: OpTable, h: Tensor) -> Tensor:
        """Place the patches of each square side by side."""

    def means(self, ops: OpTable, h: Tensor) -> Tensor:
        """Return the mean of the patches of each square."""


class Call(msgspec.Struct):
    """Step and tensors of a slice, kept between two passes."""

    inputs: SliceRows
    caches: list[LayerCache]  # of even and odd layers: while one is read, the next is written
    windows: Any  # results of `OpTable.begin`
    pictures: Any
    angles: Any  # result of `OpTable.rotary_angles`
    h: Tensor  # the layer's input is h + residual, or h without a residual
    residual: Tensor = None
    queries: Tensor = None  # of the layer that stored its keys last
    deepstack: list[Tensor] = []  # features of inner layers, per token


class Mlp(Protocol):
    def forward(self, ops: OpTable, h: Tensor) -> Tensor: ...


class LimitedLinear:
    """Linears of one input, side by side, that were trained with limits of their inputs and outputs, each with its own."""

    def __init__(self, weights: Weights, names: Sequence[str], num_inputs: int, num_outputs: Sequence[int]) -> None:
        self.parts = [
            (
                weights.limits([name], "input", [num_inputs]),
                weights.encoder_linear([f"{name}.linear"], num_inputs, [width], has_bias=False),
            )
            for name, width in zip(names, num_outputs, strict=True)
        ]
        self.outputs = weights.limits(names, "output", num_outputs)

    @property
    def format(self) -> WeightFormat:
        return self.parts[0][1].format

    def forward(self, ops: OpTable, h: Tensor) -> Tensor:
        found = [ops.linear(ops.adjust_columns([h], limits), linear) for limits, linear in self.parts]
        return ops.adjust_columns(found, self.outputs)


AnyLinear = Linear | LimitedLinear


def linear(ops: OpTable, h: Tensor, module: AnyLinear) -> Tensor:
    return module.forward(ops, h) if isinstance(module, LimitedLinear) else ops.linear(h, module)


class GatedMlp:
    """down(activation(gate) * up)."""

    def __init__(self, gate_up: AnyLinear, down: AnyLinear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    @staticmethod
    def of(config: VisionConfig, prefix: str, weights: Weights, *, has_bias: bool = True) -> GatedMlp:
        """Declare it under the usual names."""
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        return GatedMlp(
            weights.encoder_linear(gate_up, hidden, [inner, inner], has_bias=has_bias),
            weights.encoder_linear([f"{prefix}.down_proj"], inner, [hidden], has_bias=has_bias),
            config.activation,
        )

    def forward(self, ops: OpTable, h: Tensor) -> Tensor:
        return linear(ops, ops.activate_and_multiply(linear(ops, h, self.gate_up), self.activation), self.down)


class PlainMlp:
    """last(activation(first))."""

    def __init__(self, first: Linear, last: Linear, activation: str) -> None:
        self.first, self.last, self.activation = first, last, activation

    def forward(self, ops: OpTable, h: Tensor) -> Tensor:
        return ops.linear(ops.activate(ops.linear(h, self.first), self.activation), self.last)


AnyNorm = Norm | LayerNorm


def norm(ops: OpTable, h: Tensor, module: AnyNorm) -> Tensor:
    return ops.layer_norm(h, module) if isinstance(module, LayerNorm) else ops.rms_norm(h, module)


def add_norm(ops: OpTable, call: Call, module: AnyNorm) -> Tensor:
    """Return the norm of h + residual, which becomes the residual."""
    if call.residual is None:
        call.residual = call.h
        return norm(ops, call.h, module)
    if isinstance(module, LayerNorm):
        h, call.residual = ops.add_layer_norm(call.h, call.residual, module)
    else:
        h, call.residual = ops.add_rms_norm(call.h, call.residual, module)
    return h


class Block:
    """One layer's weights."""

    def __init__(
        self,
        first_norm: AnyNorm,
        qkv: AnyLinear,
        output: AnyLinear,
        inner_norm: AnyNorm,
        mlp: Mlp,
        *,
        head_norm: HeadNorm | None = None,
        end_norms: tuple[AnyNorm, AnyNorm] | None = None,
    ) -> None:
        """`end_norms`: of what attention adds to the residual, and of what the MLP adds."""
        self.first_norm, self.qkv, self.output, self.inner_norm, self.mlp = first_norm, qkv, output, inner_norm, mlp
        self.head_norm, self.end_norms = head_norm, end_norms


class Tower:
    """A whole encoder."""

    patches: dict[int, PatchLinear]  # by the number of frames
    positions: PositionTable | None = None
    first_norm: AnyNorm | None = None  # of embedded patches
    score_scale = 0.0  # of attention; 0: head_dim^-0.5

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        self.config = config
        self.shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale=self.score_scale)
        self.blocks = [self.block(index, weights) for index in range(config.depth)]

    def block(self, index: int, weights: Weights) -> Block:
        """Declare the weights of layer `index`."""
        raise NotImplementedError

    def declare_patches(
        self,
        name: str,
        weights: Weights,
        has_bias: bool,
        *,
        is_linear: bool = False,
        is_in_time: bool = False,
        are_channels_last: bool = False,
    ) -> None:
        """Declare the patch embedding, stored as a convolution over height and width, and over frames if `is_in_time` (even if
        one), or as a matrix, perhaps with the channels of a pixel side by side."""
        config = self.config
        frames, area = config.temporal_patch_size, config.patch_size**2
        axes = [3 * area] if is_linear else [3, *([frames] if is_in_time else []), config.patch_size, config.patch_size]
        shape = (config.hidden_size, *axes)
        kinds = dict.fromkeys((1, frames))
        self.patches = {
            kind: weights.patch_linear(name, shape, frames, kind, config.pixels, has_bias, are_channels_last=are_channels_last)
            for kind in kinds
        }

    def run_pass(self, ops: OpTable, call: Call, index: int) -> list[Tensor]:
        """Run pass `index` over a slice: layer `index - 1` once all its keys are stored, then the next one's keys; or
        `finish`."""
        if not index and self.first_norm is not None:
            call.h = norm(ops, call.h, self.first_norm)
        if index:
            self._leave(ops, call, index - 1)
        if index == self.config.depth:
            return self.finish(ops, call)
        self._enter(ops, call, index)
        return []

    def _enter(self, ops: OpTable, call: Call, index: int) -> None:
        h = add_norm(ops, call, self.blocks[index].first_norm)
        self.before_layer(ops, call, index)
        inputs: Any = call.inputs.pictures if self._is_whole(index) else call.inputs.windows
        block = self.blocks[index]
        qkv = linear(ops, h, block.qkv)
        call.queries = ops.rotate_and_store(inputs, qkv, call.angles, block.head_norm, self.shape, call.caches[index % 2])

    def _leave(self, ops: OpTable, call: Call, index: int) -> None:
        block, step = self.blocks[index], call.pictures if self._is_whole(index) else call.windows
        call.h = linear(ops, ops.attention(step, call.queries, self.shape, call.caches[index % 2]), block.output)
        if block.end_norms is not None:
            call.h = norm(ops, call.h, block.end_norms[0])
        h = add_norm(ops, call, block.inner_norm)
        call.h = block.mlp.forward(ops, h)
        if block.end_norms is not None:
            call.h = norm(ops, call.h, block.end_norms[1])

    def _is_whole(self, index: int) -> bool:
        return not self.config.window_size or index in self.config.full_attention_layers

    def before_layer(self, ops: OpTable, call: Call, index: int) -> None:
        """Handle the input of layer `index`, which is `call.residual`."""

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        """Return features of the tokens, [tokens, out_hidden_size] each, to be joined to `feature_width`; if two frames are
        merged, the inputs of `finish_pairs`."""
        raise NotImplementedError

    def finish_pairs(self, ops: OpTable, h: Tensor) -> list[Tensor]:
        """Return features of tokens from the results of `finish` of their two frames, side by side."""
        raise NotImplementedError
