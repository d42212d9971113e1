"""Paths of the repository and of checkpoints with outputs computed by a third party."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDEN = REPOSITORY / "tests" / "golden"
DRAWN = GOLDEN / "drawn"  # small shapes of every family; their weights are drawn (`tests/workers/variants`), not stored
# golden checkpoints that take text alone, and those that take pictures too: a new one joins the tests by being there
_MODELS = sorted(path.parent for path in GOLDEN.glob("*/model.safetensors") if path.with_name("golden.json").exists())
TEXT_MODELS = [path.name for path in _MODELS if not (path / "units.npz").exists()]
RECURRENT_MODELS = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("recurrent/*/golden.json"))  # text alone
PICTURE_MODELS = [path.name for path in _MODELS if (path / "units.npz").exists()]
