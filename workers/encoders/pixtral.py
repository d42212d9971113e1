"""Pixtral's encoder (Agrawal et al. 2024): RMSNorm, gated MLPs, rotary positions of two numbers; and two projectors, the first
of which merges squares of patches."""

from __future__ import annotations

from engine.checkpoint.vision_config import VisionConfig
from ops.modules import Tensor
from ops.table import OpTable
from workers.encoders.tower import Block, Call, GatedMlp, PlainMlp, Tower, add_norm
from workers.weights.declaration import Weights

_EPSILON = 1e-5
_PREFIX, _PROJECTOR = "vision_tower", "multi_modal_projector"


class Pixtral(Tower):
    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden, out, has_bias = config.hidden_size, config.out_hidden_size, config.has_projector_bias
        self.declare_patches(f"{_PREFIX}.patch_conv", weights, has_bias=False)
        self.first_norm = weights.norm(f"{_PREFIX}.ln_pre", hidden, _EPSILON)
        self.projector = PlainMlp(
            weights.encoder_linear([f"{_PROJECTOR}.linear_1"], hidden, [out], has_bias=has_bias),
            weights.encoder_linear([f"{_PROJECTOR}.linear_2"], out, [out], has_bias=has_bias),
            config.projector_activation,
        )

    def block(self, index: int, weights: Weights) -> Block:
        prefix, hidden = f"{_PREFIX}.transformer.layers.{index}", self.config.hidden_size
        attention = [f"{prefix}.attention.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        return Block(
            weights.norm(f"{prefix}.attention_norm", hidden, _EPSILON),
            weights.encoder_linear(attention, hidden, [hidden] * 3, has_bias=False),
            weights.encoder_linear([f"{prefix}.attention.o_proj"], hidden, [hidden], has_bias=False),
            weights.norm(f"{prefix}.ffn_norm", hidden, _EPSILON),
            GatedMlp.of(self.config, f"{prefix}.mlp", weights, has_bias=False),
        )

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        return [self.projector.forward(ops, ops.scale_and_add(call.h, 1.0, call.residual))]


class MergedPixtral(Pixtral):
    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden = config.hidden_size
        self.norm = weights.norm(f"{_PROJECTOR}.norm", hidden, config.text_norm_eps)
        self.merger = weights.encoder_linear(
            [f"{_PROJECTOR}.patch_merger.merging_layer"], hidden * config.spatial_merge_size**2, [hidden], has_bias=False
        )

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        h = call.inputs.merged(ops, add_norm(ops, call, self.norm))
        return [self.projector.forward(ops, ops.linear(h, self.merger))]
