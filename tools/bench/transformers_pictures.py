"""Time to prepare images, compared with transformers' Pillow processor: CPU time of one thread for a JPEG, in turn.

Run with an interpreter that has torch, transformers and the packages of this project:

    python -m tools.bench.transformers_pictures [WIDTHxHEIGHT] [ROUNDS]

Ours is the work of the media process: hash, size, decoding, resizing, and a copy to the memory that ranks read.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.media import images
from engine.media.identity import item_hash
from engine.media.settings import PictureSettings

MIN_PIXELS, MAX_PIXELS, MAX_FILE_PIXELS = 3136, 1003520, 89_000_000


def jpeg(width: int, height: int) -> bytes:
    blocks = np.random.default_rng(0).integers(0, 256, (128, 128, 3)).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def main(size: str = "1152x896", rounds: str = "12") -> None:
    width, _, height = size.partition("x")
    data = jpeg(int(width), int(height))
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS})
    settings = PictureSettings("qwen2_5_vl", 28, MIN_PIXELS, MAX_PIXELS, 3, True)
    slot = bytearray(3 * MAX_FILE_PIXELS // 8)

    def theirs() -> None:
        processor.preprocess([ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")])

    def ours() -> None:
        file = bytearray(data)
        item_hash(("image", settings), [file])
        settings.size_of(*images.sides_of(file, MAX_FILE_PIXELS))
        pixels = images.pixels_of(images.decoded(bytearray(data), MAX_FILE_PIXELS), settings)
        memoryview(slot)[: pixels.nbytes] = pixels.data.cast("B")

    calls: dict[str, Callable[[], None]] = {"transformers": theirs, "ours": ours}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(int(rounds)):
        for name, call in calls.items():
            begin = time.thread_time()
            call()
            times[name].append(time.thread_time() - begin)
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, median in medians.items():
        print(f"| {name} | {1000 * median:.1f} ms | {medians['transformers'] / median:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
