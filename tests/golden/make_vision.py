"""Makes `vision/`: small pictures of every kind that clients send, and what transformers 5.23's Pillow processors make of them.

Run by hand, in an environment of its own (`pip install transformers==5.23.0 pillow==13.0.0 numpy`):

    python tests/golden/make_vision.py

`pixels.json` has for each processor and file the sides that come out and a digest of the uint8 pixels.
"""

from __future__ import annotations

import hashlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

DIRECTORY = Path(__file__).parent / "vision"
ORIENTATION = 0x0112
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2VLImageProcessorPil, {"size": {"shortest_edge": 3136, "longest_edge": 50176}}),
    "qwen3_vl": (Qwen2VLImageProcessorPil, {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}}),
    "old": (Qwen2VLImageProcessorPil, {"min_pixels": 784, "max_pixels": 12544}),
    "ernie4_5_vl_moe": (Ernie4_5_VLMoeImageProcessorPil, {"size": {"shortest_edge": 3136, "longest_edge": 100352}}),
    "paddleocr_vl": (PaddleOCRVLImageProcessorPil, {"size": {"shortest_edge": 9216, "longest_edge": 40000}}),
    "bilinear": (Qwen2VLImageProcessorPil, {"resample": 2, "size": {"shortest_edge": 3136, "longest_edge": 50176}}),
}


def scene(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray[Any, Any]:
    """Slopes, an edge and a little noise: what a wrong filter or a wrong turn shows at."""
    noise = np.random.default_rng(seed).integers(0, 24, (height, width, channels))
    rows, columns = np.mgrid[0:height, 0:width]
    slopes = [rows * 200 // max(1, height - 1), columns * 200 // max(1, width - 1), (rows + columns) * 90 // (width + height)]
    picture = np.stack([slopes[channel % 3] for channel in range(channels)], axis=-1) + noise
    picture[height // 3 : height // 2, width // 4 : width // 2] = 230
    return picture.clip(0, 255).astype(np.uint8)


def saved(picture: Image.Image, form: str, **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def files() -> dict[str, bytes]:
    rgb = Image.fromarray(scene(61, 47))
    wide = Image.fromarray(scene(90, 40))
    alpha = Image.fromarray(scene(50, 40, 4, 1), "RGBA")
    alpha.putalpha(Image.fromarray(scene(50, 40, 1, 2)[:, :, 0]))
    palette = rgb.quantize(32)
    grey = Image.fromarray(scene(33, 58, 1)[:, :, 0])
    deep = Image.fromarray(scene(40, 30, 1)[:, :, 0].astype(np.uint16) * 257)
    frames = [Image.fromarray(scene(40, 36, 3, seed)).quantize(16) for seed in range(3)]
    made = {
        "plain.png": saved(rgb, "PNG"),
        "plain.jpg": saved(rgb, "JPEG", quality=90),
        "plain.webp": saved(rgb, "WEBP", quality=80),
        "lossless.webp": saved(alpha, "WEBP", lossless=True),
        "plain.gif": saved(palette, "GIF"),
        "plain.bmp": saved(rgb, "BMP"),
        "plain.tif": saved(rgb, "TIFF", compression="tiff_lzw"),
        "alpha.png": saved(alpha, "PNG"),
        "grey_alpha.png": saved(alpha.convert("LA"), "PNG"),
        "palette.png": saved(palette, "PNG"),
        "palette_alpha.png": saved(palette, "PNG", transparency=3),
        "colour_key.png": saved(rgb, "PNG", transparency=tuple(int(value) for value in scene(61, 47)[5, 5])),
        "grey.png": saved(grey, "PNG"),
        "grey.jpg": saved(grey, "JPEG"),
        "bits.png": saved(grey.convert("1"), "PNG"),
        "deep.png": saved(deep, "PNG"),
        "deep.tif": saved(deep, "TIFF"),
        "cmyk.jpg": saved(rgb.convert("CMYK"), "JPEG", quality=95),
        "cmyk.tif": saved(rgb.convert("CMYK"), "TIFF"),
        "moving.gif": saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100),
        "moving.webp": saved(rgb, "WEBP", save_all=True, append_images=[ImageOps.mirror(rgb)], duration=100, lossless=True),
        "progressive.jpg": saved(rgb, "JPEG", progressive=True, quality=70),
        "one.png": saved(Image.fromarray(scene(1, 1)), "PNG"),
        "three.png": saved(Image.fromarray(scene(3, 3)), "PNG"),
        "wide.png": saved(Image.fromarray(scene(600, 4)), "PNG"),
        "tall.png": saved(Image.fromarray(scene(2, 400)), "PNG"),
        "large.jpg": saved(Image.fromarray(scene(640, 500)), "JPEG", quality=60),
        "exact.png": saved(Image.fromarray(scene(112, 56)), "PNG"),
        "turned.png": saved(wide, "PNG", exif=turned(6)),
        "turned.webp": saved(wide, "WEBP", exif=turned(8), lossless=True),
        "turned.tif": saved(wide, "TIFF", tiffinfo={ORIENTATION: 6}),
    }
    made |= {f"turned{orientation}.jpg": saved(wide, "JPEG", exif=turned(orientation)) for orientation in range(1, 9)}
    plain = saved(wide, "PNG")
    head, tail = plain[:-12], plain[-12:]
    late = BytesIO()
    PngImagePlugin.putchunk(late, b"eXIf", turned(8)[6:])
    made["turned_late.png"] = head + late.getvalue() + tail
    return made


def pixels(processor: Any, data: bytes) -> np.ndarray[Any, Any]:
    """uint8 [height, width, 3] out of what the processor gives as patches."""
    picture = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    done = processor.preprocess([picture], do_rescale=False, do_normalize=False)
    _, height, width = (int(side) for side in done["image_grid_thw"][0])
    patch, merge = processor.patch_size, processor.merge_size
    patches = np.asarray(done["pixel_values"])
    if isinstance(processor, PaddleOCRVLImageProcessorPil):  # patches in raster order
        patches = patches.reshape(height, width, 3, patch, patch)
        return patches.transpose(0, 3, 1, 4, 2).reshape(height * patch, width * patch, 3).astype(np.uint8)
    patches = patches.reshape(height // merge, width // merge, merge, merge, 3, -1, patch, patch)[:, :, :, :, :, 0]
    return patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * patch, width * patch, 3).astype(np.uint8)


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    made = files()
    for name, data in made.items():
        (DIRECTORY / name).write_bytes(data)
    results: dict[str, Any] = {}
    for title, (processor_class, settings) in PROCESSORS.items():
        processor = processor_class(**settings)
        found: dict[str, Any] = {}
        for name, data in made.items():
            try:
                result = pixels(processor, data)
            except ValueError as error:
                found[name] = {"error": str(error)}
                continue
            digest = hashlib.blake2b(np.ascontiguousarray(result).tobytes(), digest_size=16).hexdigest()
            found[name] = {"height": result.shape[0], "width": result.shape[1], "digest": digest}
        results[title] = {"settings": settings, "files": found}
    (DIRECTORY / "pixels.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
