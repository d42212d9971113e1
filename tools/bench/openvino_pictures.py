"""Speed of OpenVINO GenAI on images: a peer of `tokamak bench compare --set pictures`, without a server.

Run with an interpreter that has openvino-genai and numpy:

    python tools/bench/openvino_pictures.py MODEL_DIRECTORY WIDTHxHEIGHT [ROUNDS] [AT_ONCE]

Its pictures are pixels, while a server decodes files. Each is new, with a question; the answer is one token.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

CACHE_GB = 1
MAX_NUM_BATCHED_TOKENS = 512
NUM_THREADS = 2
QUESTION = "What is there to be seen in the picture, and where? " * 3


class Pipeline:
    def __init__(self, model: str) -> None:
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size, settings.max_num_batched_tokens = CACHE_GB, MAX_NUM_BATCHED_TOKENS
        settings.dynamic_split_fuse = settings.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, settings, "CPU", {"INFERENCE_NUM_THREADS": NUM_THREADS}
        )
        self._generation = openvino_genai.GenerationConfig()
        self._generation.max_new_tokens, self._generation.ignore_eos = 1, True
        self._num_pictures = 0

    def picture(self, width: int, height: int) -> Any:
        """Return a new picture."""
        self._num_pictures += 1
        pixels = np.random.default_rng(self._num_pictures).integers(0, 256, (1, height, width, 3), np.uint8)
        return openvino.Tensor(pixels)

    def seconds(self, pictures: list[Any]) -> float:
        """Return the time until all are answered."""
        begin = time.perf_counter()
        for index, picture in enumerate(pictures):
            self._pipeline.add_request(index, QUESTION, [picture], self._generation)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return time.perf_counter() - begin


def main(model: str, size: str, rounds: str = "3", at_once: str = "8") -> None:
    width, height = map(int, size.split("x"))
    pipeline = Pipeline(model)
    pipeline.seconds([pipeline.picture(56, 56)])
    times = [pipeline.seconds([pipeline.picture(width, height)]) for _ in range(int(rounds))]
    print(f"openvino {size}: TTFT {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})", flush=True)
    if count := int(at_once):
        rate = count / pipeline.seconds([pipeline.picture(width, height) for _ in range(count)])
        print(f"openvino {size}: {rate:.3f} pictures/s, {count} at once", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
