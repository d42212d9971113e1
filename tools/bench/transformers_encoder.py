"""Speed of a vision encoder in transformers: a peer of `tokamak bench step --phase encode`.

Run with an interpreter that has torch and transformers:

    python tools/bench/transformers_encoder.py MODEL WIDTHxHEIGHT [float32|bfloat16] [REPETITIONS]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from transformers import AutoModelForImageTextToText

NUM_THREADS = 2


def main(path: str, size: str, dtype: str = "float32", repetitions: str = "2") -> None:
    torch.set_num_threads(NUM_THREADS)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    encoder = model.model.visual
    config = encoder.config
    columns, rows = (int(side) // config.patch_size for side in size.split("x"))
    width = 3 * config.temporal_patch_size * config.patch_size**2
    times = []
    with torch.inference_mode():
        for grid in ((2, 2), *((rows, columns),) * int(repetitions)):
            pixels = torch.randn(grid[0] * grid[1], width, dtype=getattr(torch, dtype))
            begin = time.perf_counter()
            encoder(pixels, grid_thw=torch.tensor([[1, *grid]]))
            times.append(time.perf_counter() - begin)
    print(f"transformers {dtype}: {rows * columns / statistics.median(times[1:]):.1f} patches/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
