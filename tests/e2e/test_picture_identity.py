"""An answer about pictures depends only on the request: bytes are compared across conditions, in every precision."""

from __future__ import annotations

import base64
import random
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.precisions import PRECISIONS
from tests.e2e.workload import Body, answers, answers_together, mixed_bodies

MODEL = GOLDEN / "qwen3_vl"
START, END, IMAGE, VIDEO = 3, 4, 5, 6
UNIT_TOKENS = 12
NUM_ALIKE = 10
OPTIONS = ("--max-model-len", "400", "--mm-processor-kwargs", f'{{"max_pixels": {UNIT_TOKENS * 32 * 32}}}')
# how much a step takes, and what is short: with each precision one engine more than the one that sets the measure
CROWDED = {
    "float32": ("--max-num-batched-tokens", "16", "--max-num-seqs", "16", "--encoder-cache-size", str(UNIT_TOKENS)),
    "bfloat16": ("--max-num-batched-tokens", "48", "--block-size", "4", "--num-kv-blocks", "100"),
    "int8": ("--max-num-batched-tokens", "48", "--max-num-seqs", "16", "--encoder-cache-size", str(UNIT_TOKENS)),
    "int4": ("--max-num-batched-tokens", "16", "--max-num-seqs", "16", "--no-enable-prefix-caching", "--threads", "2"),
}
ROUNDED_TOWER = ("--vision-quantization", "wint8")


def link(pixels: np.ndarray) -> str:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def bodies() -> list[Body]:
    """Return one text about pictures that differ in a pixel; two pictures of other sizes; video; and text alone."""
    rng = np.random.default_rng(3)
    first = rng.integers(0, 256, (96, 128, 3), np.uint8)
    made = mixed_bodies(NUM_ALIKE + 8, seed=4, max_tokens=24, max_prompt=60)
    text = [random.Random(5).randrange(40, 1000) for _ in range(20)]
    for number, body in enumerate(made[:NUM_ALIKE]):
        pixels = first.copy()
        pixels[number * 5, number * 7] ^= 128
        body["prompt"] = [*text[:7], START, IMAGE, END, *text[7:]]
        body["multi_modal_data"] = {"image": [f"data:image/png;base64,{link(pixels)}"]}
    for number, body in enumerate(made[NUM_ALIKE : NUM_ALIKE + 4]):
        frames = [link(rng.integers(0, 256, (64, 64, 3), np.uint8)) for _ in range(3)]
        pictures = [link(rng.integers(0, 256, (128 - 32 * number, 64, 3), np.uint8)), frames[0]]
        body["prompt"] = [*text, START, IMAGE, END, 50, START, IMAGE, END, 60, VIDEO, *text[: 3 + number]]
        body["multi_modal_data"] = {
            "image": [f"data:image/png;base64,{picture}" for picture in pictures],
            "video": [f"data:video/jpeg;base64,{','.join(frames)}"],
        }
    return made


@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bytes(precision: str) -> None:
    wanted = bodies()
    options = (*OPTIONS, *PRECISIONS[precision], *(ROUNDED_TOWER if precision == "int8" else ()))
    with EngineProcess(MODEL, *options, "--max-num-batched-tokens", "512") as engine:
        alone = answers(engine, wanted, concurrency=1)
        assert answers_together(engine, wanted) == alone, "all at once, and known"
        assert engine.metric("encoder_units_total") == NUM_ALIKE + 4 * (2 + 2), "each once, a video's odd frame with itself"
    assert len({tuple(answer.token_logprobs) for answer in alone}) == len(alone), "one pixel is another picture"
    with EngineProcess(MODEL, *options, *CROWDED[precision]) as engine:
        assert answers_together(engine, wanted) == alone
        assert answers(engine, wanted[::-1], concurrency=7)[::-1] == alone
        if "--num-kv-blocks" in CROWDED[precision]:
            assert engine.metric("num_preemptions_total") > 0
        if "--encoder-cache-size" in CROWDED[precision]:
            assert engine.metric("encoder_evictions_total") > 0
