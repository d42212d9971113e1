"""Vision models for settings of the media process, and the small files of `tests/golden/vision`."""

from __future__ import annotations

import json
from typing import Any

from engine.checkpoint.processor_files import IMAGE_PROCESSOR
from engine.checkpoint.record import ModelRecord
from engine.media.settings import MediaSettings
from tests.paths import GOLDEN

VISION = GOLDEN / "vision"
PIXELS: dict[str, Any] = json.loads((VISION / "pixels.json").read_text())


def record_of(family: str, files: dict[str, Any] | None = None) -> ModelRecord:
    """Return the record of a golden model, with other processor files if given: JSON objects, or bytes."""
    record = ModelRecord.read(GOLDEN / family)
    if files is None:
        return record
    others = {name: content for name, content in record.files.items() if name != IMAGE_PROCESSOR}
    given = {name: content if isinstance(content, bytes) else json.dumps(content).encode() for name, content in files.items()}
    return ModelRecord(record.path, record.config, others | given)


def settings_of(family: str, settings: dict[str, Any] | None = None) -> MediaSettings:
    """Return the settings of a golden model with `settings` in its processor file."""
    return MediaSettings.of(record_of(family, None if settings is None else {IMAGE_PROCESSOR: settings}), {}, {})
