"""Qwen3-VL's encoder (Qwen team 2025): LayerNorm, learned positions interpolated over the picture, and separate mergers for
some inner layers."""

from __future__ import annotations

from engine.checkpoint.vision_config import VisionConfig
from ops.modules import Tensor
from ops.table import OpTable
from workers.encoders.tower import Block, Call, PlainMlp, Tower, add_norm
from workers.weights.declaration import Weights

_EPSILON = 1e-6


class _Merger:
    """Norm and MLP of squares of patches. The norm covers each patch, or a whole square."""

    def __init__(self, config: VisionConfig, prefix: str, weights: Weights, *, is_of_square: bool) -> None:
        merged = config.hidden_size * config.spatial_merge_size**2
        self.norm = weights.layer_norm(f"{prefix}.norm", merged if is_of_square else config.hidden_size, _EPSILON)
        self.mlp = PlainMlp(
            weights.encoder_linear([f"{prefix}.linear_fc1"], merged, [merged]),
            weights.encoder_linear([f"{prefix}.linear_fc2"], merged, [config.out_hidden_size]),
            "gelu",
        )


class Qwen3VL(Tower):
    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.declare_patches("visual.patch_embed.proj", weights, has_bias=True, is_in_time=True)
        self.positions = weights.position_table(
            "visual.pos_embed", config.position_table_side, config.hidden_size, has_aligned_corners=True
        )
        self.merger = _Merger(config, "visual.merger", weights, is_of_square=False)
        self.deepstack = [
            _Merger(config, f"visual.deepstack_merger_list.{index}", weights, is_of_square=True)
            for index in range(len(config.deepstack_layers))
        ]

    def block(self, index: int, weights: Weights) -> Block:
        prefix, hidden, inner = f"visual.blocks.{index}", self.config.hidden_size, self.config.intermediate_size
        return Block(
            weights.layer_norm(f"{prefix}.norm1", hidden, _EPSILON),
            weights.encoder_linear([f"{prefix}.attn.qkv"], hidden, [3 * hidden]),
            weights.encoder_linear([f"{prefix}.attn.proj"], hidden, [hidden]),
            weights.layer_norm(f"{prefix}.norm2", hidden, _EPSILON),
            PlainMlp(
                weights.encoder_linear([f"{prefix}.mlp.linear_fc1"], hidden, [inner]),
                weights.encoder_linear([f"{prefix}.mlp.linear_fc2"], inner, [hidden]),
                self.config.activation,
            ),
        )

    def before_layer(self, ops: OpTable, call: Call, index: int) -> None:
        if index - 1 in self.config.deepstack_layers:
            merger = self.deepstack[self.config.deepstack_layers.index(index - 1)]
            h = ops.layer_norm(call.inputs.merged(ops, call.residual), merger.norm)
            call.deepstack.append(merger.mlp.forward(ops, h))

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        h = add_norm(ops, call, self.merger.norm)
        self.before_layer(ops, call, self.config.depth)
        return [self.merger.mlp.forward(ops, call.inputs.merged(ops, h)), *call.deepstack]
