"""Encoders of pictures and video, written straight-line against the op table, one file per family. Read `tower.py` first."""

from __future__ import annotations

from importlib import import_module

from engine.checkpoint.families import media_rules
from engine.checkpoint.vision_config import VisionConfig
from workers.encoders.tower import Tower
from workers.weights.declaration import Weights


def declare_encoder(config: VisionConfig, weights: Weights) -> Tower:
    """Declare the encoder of `config`, with empty weights."""
    module_name, _, class_name = media_rules(config.kind).encoder.partition(":")
    tower: type[Tower] = getattr(import_module(module_name), class_name)
    return tower(config, weights)
