"""Features of the golden pictures by transformers' encoders: `features.npz` in the directory of each vision model, float32
[rows, width] by the picture's file; deepstack layers are columns after the features.

    python tests/golden/make_features.py   # with torch, Pillow and transformers 5.23
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

GOLDEN = Path(__file__).parent


def features_of(model: Any, pixels: torch.Tensor, grid: torch.Tensor) -> np.ndarray:
    found = model.model.get_image_features(pixel_values=pixels, image_grid_thw=grid, return_dict=True)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(part)) for part in parts], dim=-1).numpy()


def make(directory: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    made = {}
    for case in json.loads((directory / "golden.json").read_text())["cases"]:
        for name, grid in zip(case["images"], case["image_grid_thw"], strict=True):
            batch = processor(images=[Image.open(directory / name)], return_tensors="pt")
            assert batch["image_grid_thw"].tolist() == [grid], (name, batch["image_grid_thw"], grid)
            made[name] = features_of(model, batch["pixel_values"], batch["image_grid_thw"])
            print(directory.name, name, grid, made[name].shape)
    np.savez(directory / "features.npz", **made)


if __name__ == "__main__":
    with torch.no_grad():
        for name in ("qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe", "paddleocr_vl"):
            make(GOLDEN / name)
