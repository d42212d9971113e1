"""SigLIP (Zhai et al. 2023): LayerNorm, learned positions, an MLP without a gate; and Gemma 3's projector, which makes a token
of the mean of a square of patches."""

from __future__ import annotations

from engine.checkpoint.vision_config import VisionConfig
from ops.modules import Tensor
from ops.table import OpTable
from workers.encoders.tower import Block, Call, PlainMlp, Tower, add_norm
from workers.weights.declaration import Weights

_PREFIX, _PROJECTOR = "vision_tower", "multi_modal_projector"


class SiglipPooled(Tower):
    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        hidden = config.hidden_size
        self.declare_patches(f"{_PREFIX}.embeddings.patch_embedding", weights, has_bias=True)
        self.positions = weights.position_table(
            f"{_PREFIX}.embeddings.position_embedding", config.position_table_side, hidden, has_aligned_corners=False
        )
        self.norm = weights.layer_norm(f"{_PREFIX}.post_layernorm", hidden, config.norm_eps)
        self.projector_norm = weights.norm(f"{_PROJECTOR}.mm_soft_emb_norm", hidden, config.norm_eps)
        self.projector = weights.encoder_linear(
            [f"{_PROJECTOR}.mm_input_projection"], hidden, [config.out_hidden_size], has_bias=False
        )

    def block(self, index: int, weights: Weights) -> Block:
        prefix, hidden, inner = f"{_PREFIX}.encoder.layers.{index}", self.config.hidden_size, self.config.intermediate_size
        attention = [f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        return Block(
            weights.layer_norm(f"{prefix}.layer_norm1", hidden, self.config.norm_eps),
            weights.encoder_linear(attention, hidden, [hidden] * 3),
            weights.encoder_linear([f"{prefix}.self_attn.out_proj"], hidden, [hidden]),
            weights.layer_norm(f"{prefix}.layer_norm2", hidden, self.config.norm_eps),
            PlainMlp(
                weights.encoder_linear([f"{prefix}.mlp.fc1"], hidden, [inner]),
                weights.encoder_linear([f"{prefix}.mlp.fc2"], inner, [hidden]),
                self.config.activation,
            ),
        )

    def finish(self, ops: OpTable, call: Call) -> list[Tensor]:
        h = call.inputs.means(ops, add_norm(ops, call, self.norm))
        return [ops.linear(ops.rms_norm(h, self.projector_norm), self.projector)]
