"""Qwen2.5-VL's encoder (Bai et al. 2025): RMSNorm, gated MLPs, windows in all layers but a few."""

from __future__ import annotations

from engine.checkpoint.vision_config import VisionConfig
from ops.modules import Tensor
from ops.table import OpTable
from workers.encoders.tower import Block, Call, GatedMlp, PlainMlp, Tower, add_norm
from workers.weights.declaration import Weights

_EPSILON = 1e-6


class Qwen2_5VL(Tower):
    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.declare_patches("visual.patch_embed.proj", weights, has_bias=False, is_in_time=True)
        hidden = config.hidden_size
        merged = hidden * config.spatial_merge_size**2
        self.norm = weights.norm("visual.merger.ln_q", hidden, _EPSILON)
        self.merger = PlainMlp(
            weights.encoder_linear(["visual.merger.mlp.0"], merged, [merged]),
            weights.encoder_linear(["visual.merger.mlp.2"], merged, [config.out_hidden_size]),
            "gelu",
        )

    def block(self, index: int, weights: Weights) -> Block:
        prefix, hidden = f"visual.blocks.{index}", self.config.hidden_size
        return Block(
            weights.norm(f"{prefix}.norm1", hidden, _EPSILON),
            weights.encoder_linear([f"{prefix}.attn.qkv"], hidden, [3 * hidden]),
            weights.encoder_linear([f"{prefix}.attn.proj"], hidden, [hidden]),
            weights.norm(f"{prefix}.norm2", hidden, _EPSILON),
            GatedMlp.of(self.config, f"{prefix}.mlp", weights),
        )

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        h = add_norm(ops, call, self.norm)
        return [self.merger.forward(ops, call.inputs.merged(ops, h))]
