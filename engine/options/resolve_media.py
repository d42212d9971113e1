"""Options for a vision model: its process, its memory and its limits. Used by `resolve.py` alone."""

from __future__ import annotations

import importlib.util
from typing import Any

from engine.checkpoint.record import ModelRecord
from engine.errors import CheckpointError, MissingExtraError, OptionError
from engine.installation import DISTRIBUTION
from engine.media.settings import MediaSettings
from engine.options.table import OptionValues

DEFAULT_ENCODER_CACHE = 16384  # rows
_SAME = (
    "enable_mm_embeds",
    "media_download_parallel",
    "allowed_media_domains",
    "allowed_media_networks",
    "allowed_local_media_path",
    "allowed_object_buckets",
    "max_image_pixels",
    "max_media_bytes",
    "media_memory",
    "mm_processor_cache_gb",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "language_model_only",
    "vision_quantization",
)
_PACKAGES = {"PIL": "pillow", "av": "av"}  # packages of the extra `vision`, by imported module
_GIVEN = ("media_processes", "encoder_cache_size", "vision_quantization")  # without effect for a text model


def missing_packages() -> list[str]:
    """Return the packages for pictures and video that are not installed."""
    return [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]


def resolve_media(options: OptionValues, record: ModelRecord, max_model_len: int, ops: str) -> dict[str, Any]:
    """Return fields of EngineConfig. Raises OptionError if the model does not support the options, or if memory limits are too
    small."""
    values = options.values
    fields = {key: values[key] for key in _SAME}
    fields["media_fetch_timeout_s"] = values["media_fetch_timeout"]
    fields["limit_mm_per_prompt"] = {"image": 999, "video": 999} | values["limit_mm_per_prompt"]
    vision = record.config.vision
    if vision is None or values["language_model_only"]:
        for key in _GIVEN:
            if key in options.given:
                why = "--language-model-only is set" if vision else "the model takes only text"
                raise OptionError(f"--{key.replace('_', '-')} {values[key]} has no effect: {why}; remove it")
        return fields
    if missing := missing_packages():
        raise MissingExtraError(
            f"--model {record.path}: this model reads images and needs {' and '.join(missing)}, not installed here; "
            f"run pip install '{DISTRIBUTION}[vision]', or serve it for text alone with --language-model-only",
            "vision",
        )
    if values["vision_quantization"] != "none" and ops != "native":
        raise OptionError(
            f"--vision-quantization {values['vision_quantization']} needs native ops, but the ops are {ops}; remove it"
        )
    endpoint = values["object_store_endpoint"]
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise OptionError(f"--object-store-endpoint {endpoint}: expected http:// or https:// with a host")
    fields |= {key: values[key] for key in values if key.startswith("object_store_")}
    if "max_body_bytes" not in options.given:  # the largest video as base64, and the rest of the request
        values["max_body_bytes"] = max(values["max_body_bytes"], 3 * values["max_media_bytes"])
    fields["media_processes"] = values["media_processes"]
    try:
        settings = MediaSettings.of(record, values["mm_processor_kwargs"], values["media_io_kwargs"])
    except CheckpointError as error:
        raise OptionError(f"--model {record.path}: {error}") from error
    largest = min(settings.max_frame_pixels // vision.merged_pixels**2, max_model_len)
    unit_bytes = 3 * largest * vision.merged_pixels**2 * (vision.frames_per_unit if vision.video_token_id >= 0 else 1)
    fields["encoder_cache_size"] = values["encoder_cache_size"] or max(DEFAULT_ENCODER_CACHE, largest)
    fields["encoder_row_width"] = vision.feature_width
    for name, given, least, what in (
        ("encoder-cache-size", fields["encoder_cache_size"], largest, "tokens of the largest image"),
        ("mm-processor-cache-gb", values["mm_processor_cache_gb"], unit_bytes / (1 << 30), "GiB of pixels of the largest item"),
        ("media-memory", values["media_memory"], 2 * values["max_media_bytes"], "bytes of a video, twice --max-media-bytes"),
    ):
        if given < least:
            smaller = "raise it, or lower max_pixels in --mm-processor-kwargs" if name != "media-memory" else "raise it"
            raise OptionError(f"--{name} {given:g} is too small for the {least:g} {what}; {smaller}")
    return fields
