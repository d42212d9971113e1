"""Gemma 4's encoder (Google 2026): RMSNorm before and after attention and gated MLPs, normalized heads, learned positions of
rows and columns, and rotary positions of both. A token is the mean of a square of patches."""

from __future__ import annotations

from engine.checkpoint.vision_config import VisionConfig
from ops.modules import Tensor
from ops.table import OpTable
from workers.encoders.tower import AnyLinear, Block, Call, GatedMlp, LimitedLinear, Tower
from workers.weights.declaration import Weights

_PREFIX, _PROJECTOR = "vision_tower", "embed_vision"


class Gemma4Tower(Tower):
    score_scale = 1.0

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden, embedder = config.hidden_size, f"{_PREFIX}.patch_embedder"
        self.declare_patches(f"{embedder}.input_proj", weights, has_bias=False, is_linear=True, are_channels_last=True)
        self.positions = weights.axis_positions(f"{embedder}.position_embedding_table", config.num_places, hidden)
        self.factor = hidden**0.5  # of pooled patches
        self.standard = weights.standardization(f"{_PREFIX}.std", hidden, self.factor) if config.is_standardized else None
        self.norm = weights.norm(f"{_PROJECTOR}.embedding_pre_projection_norm", hidden, config.norm_eps, has_weight=False)
        self.projector = weights.encoder_linear(
            [f"{_PROJECTOR}.embedding_projection"], hidden, [config.out_hidden_size], has_bias=False
        )

    def block(self, index: int, weights: Weights) -> Block:
        config, prefix = self.config, f"{_PREFIX}.encoder.layers.{index}"
        hidden, inner, shape = config.hidden_size, config.intermediate_size, self.shape

        def linear(names: list[str], num_inputs: int, num_outputs: list[int]) -> AnyLinear:
            names = [f"{prefix}.{name}" for name in names]
            if config.has_limits:
                return LimitedLinear(weights, names, num_inputs, num_outputs)
            return weights.encoder_linear([f"{name}.linear" for name in names], num_inputs, num_outputs, has_bias=False)

        first, attended, inner_norm, added = (
            weights.norm(f"{prefix}.{name}_layernorm", hidden, config.norm_eps)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        attention = [f"self_attn.{name}_proj" for name in "qkv"]
        return Block(
            first,
            linear(attention, hidden, [shape.queries_width, shape.keys_width, shape.keys_width]),
            linear(["self_attn.o_proj"], shape.queries_width, [hidden]),
            inner_norm,
            GatedMlp(
                linear(["mlp.gate_proj", "mlp.up_proj"], hidden, [inner, inner]),
                linear(["mlp.down_proj"], inner, [hidden]),
                config.activation,
            ),
            head_norm=weights.head_norm(
                f"{prefix}.self_attn.q_norm", f"{prefix}.self_attn.k_norm", shape, config.norm_eps, has_values=True
            ),
            end_norms=(attended, added),
        )

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        h = call.inputs.means(ops, ops.scale_and_add(call.h, 1.0, call.residual))
        if self.standard is None:
            h = ops.scale_and_add(h, self.factor, None)
        else:
            h = ops.adjust_columns([h], self.standard)
        return [ops.linear(ops.rms_norm(h, self.norm), self.projector)]
