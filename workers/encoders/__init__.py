"""The encoders of pictures and video, written straight-line against the op table, a file a family. Read `tower.py` first."""

from __future__ import annotations

from engine.checkpoint.vision_config import VisionConfig
from workers.encoders.ernie4_5_vl_moe import Ernie4_5VLMoe
from workers.encoders.paddleocr_vl import PaddleOcrVL
from workers.encoders.qwen2_5_vl import Qwen2_5VL
from workers.encoders.qwen3_vl import Qwen3VL
from workers.encoders.tower import Tower
from workers.weights.declaration import Weights

_TOWERS: dict[str, type[Tower]] = {
    "qwen2_5_vl": Qwen2_5VL,
    "qwen3_vl": Qwen3VL,
    "ernie4_5_vl_moe": Ernie4_5VLMoe,
    "paddleocr_vl": PaddleOcrVL,
}


def declare_encoder(config: VisionConfig, weights: Weights) -> Tower:
    """The encoder of `config`, its weights declared and empty."""
    return _TOWERS[config.kind](config, weights)
