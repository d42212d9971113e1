"""The checkpoint's processor files: the only place that decides which of them applies to images, and which to video.

As in transformers 5.23 (image_processing_base.py, video_processing_utils.py): the matching part of the file for all processors,
if there is one; else the file of the kind; for video else the file for images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.json_fields import JsonOptions
from engine.errors import CheckpointError

PROCESSOR = "processor_config.json"
IMAGE_PROCESSOR = "preprocessor_config.json"
VIDEO_PROCESSOR = "video_preprocessor_config.json"


def picture_options(files: Mapping[str, bytes], directory: Path) -> JsonOptions:
    """Return the image options among `files`, a checkpoint's files by their names in `directory`; empty if there are none.
    Raises CheckpointError if a file is not a JSON object."""
    return _part(files, directory, "image_processor") or _whole(files, directory, IMAGE_PROCESSOR)


def clip_options(files: Mapping[str, bytes], directory: Path) -> JsonOptions:
    """Return the video options in the same way."""
    name = VIDEO_PROCESSOR if VIDEO_PROCESSOR in files else IMAGE_PROCESSOR
    return _part(files, directory, "video_processor") or _whole(files, directory, name)


def _part(files: Mapping[str, bytes], directory: Path, name: str) -> JsonOptions | None:
    both = _whole(files, directory, PROCESSOR)
    return None if both.values.get(name) is None else both.within(name)


def _whole(files: Mapping[str, bytes], directory: Path, name: str) -> JsonOptions:
    try:
        content: Any = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} contains a {type(content).__name__}, expected an object")
    return JsonOptions(content, directory / name)
