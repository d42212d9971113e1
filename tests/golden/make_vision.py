"""Makes `vision/`: small pictures and clips of every kind that clients send, and what transformers 5.23 makes of them.

Run by hand, in an environment of its own (`pip install transformers==5.23.0 pillow==13.0.0 av numpy torch torchvision`):

    python tests/golden/make_vision.py

`pixels.json` has for each Pillow processor and file the sides that come out and a digest of the uint8 pixels; `clips.npz` the
first and the last frame that the video processors give for each clip, `clips.json` what they were asked for;
`rules.json` which frames they choose and which sides they give.
"""

from __future__ import annotations

import hashlib
import json
import random
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image, ImageOps, PngImagePlugin
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil
from transformers.models.ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe import Ernie4_5_VLMoeVideoProcessor
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize as paddleocr_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as usual_size
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as shared_size
from transformers.video_utils import VideoMetadata

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
    """Return slopes, an edge and a little noise, which reveal a wrong filter or rotation."""
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
    """Return uint8 [height, width, 3] from the patches of the processor."""
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


VIDEO_PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2VLVideoProcessor, {"fps": 2, "size": {"shortest_edge": 784, "longest_edge": 3136}}),
    "qwen3_vl": (Qwen3VLVideoProcessor, {"fps": 2, "size": {"shortest_edge": 4096, "longest_edge": 24576}}),
    "ernie4_5_vl_moe": (
        Ernie4_5_VLMoeVideoProcessor,
        {"fps": 2, "min_frames": 3, "draw_on_frames": False, "size": {"shortest_edge": 784, "longest_edge": 3136}},
    ),
}


def clip(form: str, codec: str, pixel_format: str, num_frames: int, rate: Fraction, sides: tuple[int, int] = (64, 48)) -> bytes:
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = sides
        stream.pix_fmt = pixel_format
        for index in range(num_frames):
            picture = np.roll(scene(*sides), 5 * index, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def clips() -> dict[str, bytes]:
    return {
        "clip.mp4": clip("mp4", "mpeg4", "yuv420p", 25, Fraction(10)),
        "clip.webm": clip("webm", "libvpx", "yuv420p", 18, Fraction(6)),
        "clip.avi": clip("avi", "mjpeg", "yuvj420p", 9, Fraction(30000, 1001)),
        "clip.mkv": clip("matroska", "mpeg4", "yuv420p", 15, Fraction(5)),
    }


def make_clips() -> None:
    arrays: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    for name, data in clips().items():
        (DIRECTORY / name).write_bytes(data)
        with av.open(BytesIO(data)) as container:
            total = sum(packet.size > 0 for packet in container.demux(video=0))
            rate = float(container.streams.video[0].average_rate)
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        for title, (processor_class, settings) in VIDEO_PROCESSORS.items():
            processor = processor_class(**settings)
            chosen = [int(index) for index in processor.sample_frames(metadata, fps=settings["fps"])]
            frames = read_frames(data, chosen)
            done = processor.preprocess(
                [torch.from_numpy(frames).permute(0, 3, 1, 2)],
                video_metadata=[VideoMetadata(total_num_frames=total, fps=rate, frames_indices=chosen)],
                do_sample_frames=False,
                do_rescale=False,
                do_normalize=False,
                return_tensors="pt",
            )
            times, height, width = (int(side) for side in done["video_grid_thw"][0])
            patch, merge = processor.patch_size, processor.merge_size
            patches = done["pixel_values_videos"].numpy()
            deep = patches.shape[1] // (3 * patch * patch)
            patches = patches.reshape(times, height // merge, width // merge, merge, merge, 3, deep, patch, patch)
            made = patches.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(times * deep, height * patch, width * patch, 3)
            arrays[f"{title} {name}"] = made[[0, -1]].round().clip(0, 255).astype(np.uint8)
            asked[f"{title} {name}"] = {"settings": settings, "grid": [times, height, width], "chosen": chosen, "fps": rate}
    np.savez_compressed(DIRECTORY / "clips.npz", **arrays)
    (DIRECTORY / "clips.json").write_text(json.dumps(asked, indent=1) + "\n")


def read_frames(data: bytes, chosen: list[int]) -> np.ndarray[Any, Any]:
    path = DIRECTORY / "reading.tmp"
    path.write_bytes(data)
    try:
        with av.open(str(path)) as container:
            every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack([every[index] for index in chosen])
    finally:
        path.unlink()


def rules() -> dict[str, Any]:
    """Return random choices of frames and sides."""
    chance = random.Random(5)
    choices, sizes = [], []
    for _ in range(120):
        total, rate = chance.randint(2, 3000), chance.choice([5.0, 12.5, 24.0, 25.0, 29.97002997002997, 60.0])
        least, most, fps = chance.choice([2, 4, 16]), chance.choice([16, 100, 768]), chance.choice([0.5, 1.0, 2.0, 4.0])
        asked = chance.choice([0, 0, 0, 16])
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        for title, (processor_class, settings) in VIDEO_PROCESSORS.items():
            processor = processor_class(**{**settings, "min_frames": least, "max_frames": most, "fps": None})
            wish = {"num_frames": min(asked, total, most)} if asked else {"fps": fps}
            try:
                chosen = [int(index) for index in processor.sample_frames(metadata, **wish)]
            except (RuntimeError, ValueError, ZeroDivisionError):
                continue  # it gives up where we have an answer
            choices.append(
                [title, total, rate, fps, least, most, wish.get("num_frames", 0), chosen[:3], chosen[-3:], len(chosen)]
            )
    for _ in range(120):
        height, width = int(10 ** chance.uniform(0, 3.7)), int(10 ** chance.uniform(0, 3.7))
        factor, least, most = (
            chance.choice([28, 32]),
            chance.choice([784, 3136, 147456]),
            chance.choice([50176, 1003520, 2359296]),
        )
        frames = chance.choice([2, 3, 16, 101])
        if least > most:
            continue
        for title, rule in (("usual", usual_size), ("paddleocr", paddleocr_size)):
            try:
                sizes.append([title, height, width, factor, least, most, 1, rule(height, width, factor, least, most)])
            except ValueError:
                continue
        try:
            sizes.append(
                [
                    "shared",
                    height,
                    width,
                    factor,
                    least,
                    most,
                    frames,
                    shared_size(frames, height, width, 2, factor, least, most),
                ]
            )
        except ValueError:
            continue
    return {"choices": choices, "sizes": sizes}


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
    make_clips()
    (DIRECTORY / "rules.json").write_text(json.dumps(rules()) + "\n")


if __name__ == "__main__":
    main()
