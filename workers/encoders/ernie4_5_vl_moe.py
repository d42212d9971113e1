"""ERNIE 4.5 VL's encoder (Baidu 2025): LayerNorm, and a resampler that makes one token of 2 x 2 patches in two frames; a
picture is paired with itself."""

from __future__ import annotations

from engine.checkpoint.vision_config import VisionConfig
from ops.modules import LayerNorm, Tensor
from ops.table import OpTable
from workers.encoders.tower import Block, Call, PlainMlp, Tower, add_norm
from workers.weights.declaration import Weights


class Ernie4_5VLMoe(Tower):
    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.declare_patches("vision_model.patch_embed.proj", weights, has_bias=False, is_linear=True)
        hidden, out = config.hidden_size, config.out_hidden_size
        merged = hidden * config.spatial_merge_size**2
        self.norm = weights.layer_norm("vision_model.ln", hidden, config.norm_eps)
        self.spatial, self.spatial_norm = self._resampler("spatial_linear", merged, merged, weights)
        self.temporal, self.temporal_norm = self._resampler("temporal_linear", merged * 2, merged, weights)
        self.last = weights.encoder_linear(["model.resampler_model.mlp"], merged, [out])
        self.last_norm = weights.norm("model.resampler_model.after_norm", out, config.text_norm_eps)

    def _resampler(self, name: str, num_inputs: int, width: int, weights: Weights) -> tuple[PlainMlp, LayerNorm]:
        prefix = f"model.resampler_model.{name}"
        first = weights.encoder_linear([f"{prefix}.0"], num_inputs, [width])
        last = weights.encoder_linear([f"{prefix}.2"], width, [width])
        return PlainMlp(first, last, "gelu"), weights.layer_norm(f"{prefix}.3", width, self.config.norm_eps)

    def block(self, index: int, weights: Weights) -> Block:
        prefix, hidden, inner = f"vision_model.blocks.{index}", self.config.hidden_size, self.config.intermediate_size
        return Block(
            weights.layer_norm(f"{prefix}.norm1", hidden, self.config.norm_eps),
            weights.encoder_linear([f"{prefix}.attn.qkv"], hidden, [3 * hidden]),
            weights.encoder_linear([f"{prefix}.attn.proj"], hidden, [hidden]),
            weights.layer_norm(f"{prefix}.norm2", hidden, self.config.norm_eps),
            PlainMlp(
                weights.encoder_linear([f"{prefix}.mlp.fc1"], hidden, [inner]),
                weights.encoder_linear([f"{prefix}.mlp.fc2"], inner, [hidden]),
                self.config.activation,
            ),
        )

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        h = call.inputs.merged(ops, add_norm(ops, call, self.norm))
        return [ops.layer_norm(self.spatial.forward(ops, h), self.spatial_norm)]

    def finish_pairs(self, ops: OpTable, h: Tensor) -> list[Tensor]:
        h = ops.layer_norm(self.temporal.forward(ops, h), self.temporal_norm)
        return [ops.rms_norm(ops.linear(h, self.last), self.last_norm)]
