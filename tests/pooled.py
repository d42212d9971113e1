"""Models that make vectors or scores, with what transformers makes of some texts: `tests/golden/pooling/golden.json`, which
`tests/golden/make_pooling.py` writes. Their weights are drawn, not stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from tests.paths import GOLDEN
from tests.workers.variants import values

MODELS: dict[str, Any] = json.loads((GOLDEN / "pooling" / "golden.json").read_text())
TOLERANCE = 1e-4
QUERY = "what is the sun"


def write_checkpoint(name: str, directory: Path, labels: Sequence[str] = ()) -> Path:
    """Write the files of the model `name` to the new `directory`. `labels`: those of a classifier with more of them."""
    model = MODELS[name]
    if labels:
        head = {name: [len(labels), *shape[1:]] for name, shape in model["shapes"].items() if name.startswith("classifier.")}
        config = model["config"] | {"id2label": {str(index): label for index, label in enumerate(labels)}}
        model = model | {"config": config, "shapes": model["shapes"] | head}
    directory.mkdir(parents=True)
    for file, content in {"config.json": model["config"], **model["files"]}.items():
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_text(content if isinstance(content, str) else json.dumps(content))
    if "tokenizer.json" not in model["files"]:
        shutil.copyfile(GOLDEN / "qwen3" / "tokenizer.json", directory / "tokenizer.json")
    tensors = {name: values(name.lower(), tuple(shape)) for name, shape in model["shapes"].items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
