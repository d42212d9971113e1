"""Paths of the repository and of checkpoints with outputs computed by a third party."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDEN = REPOSITORY / "tests" / "golden"
TEXT_MODELS = sorted(  # golden checkpoints that take text alone: a new one joins the tests by being there
    path.parent.name
    for path in GOLDEN.glob("*/model.safetensors")
    if path.with_name("golden.json").exists() and not path.with_name("units.npz").exists()
)
