"""Other shapes and options of the architectures agree with transformers (`variants/`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.messages import MediaUnit, SamplingParams
from engine.messages.media import Encode, EncoderCall
from shm.slab import SlabHandle
from tests.golden.make_units import pixels_of
from tests.workers import variants
from tests.workers.checkpoints import write_checkpoint
from tests.workers.seeing import cut_at_units, hash_of, make_seeing_runner
from tests.workers.serving import ServedSequence, Serving, encoder_of, make_runner
from workers.models import declare_model

VARIANTS: dict[str, dict[str, Any]] = json.loads(Path(variants.__file__).with_name("variants.json").read_text())
SEEING: dict[str, dict[str, Any]] = json.loads(Path(variants.__file__).with_name("seeing.json").read_text())
ADDED_TOKENS = {"7": {"content": "[IMG_BREAK]"}, "4": {"content": "[IMG_END]"}}
PROCESSOR = {"rescale_factor": 1 / 255, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.26, 0.27]}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    write_checkpoint(tmp_path, variant["config"])
    # the native ops quantize activations for weights of 4 bits
    ops = {"ops": "reference", "plan": "eager"} if "quantization_config" in variant["config"] else {}
    runner = make_runner(tmp_path, max_model_len=128, num_kv_blocks=40, **ops)
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    whole, chunked = (ServedSequence(variant["prompt_token_ids"], sampling, len(variant["greedy_token_ids"])) for _ in range(2))
    for sequence, chunk in ((whole, 512), (chunked, 23)):
        serving = Serving(runner, chunk=chunk)
        serving.place(sequence, 1)
        serving.run([sequence])
    check(variant, whole, chunked)


# each has a partial tile of patches, which reference ops pad; two of them are enough
@pytest.mark.parametrize(
    ("name", "ops"), [(name, "native") for name in SEEING] + [(name, "reference") for name in list(SEEING)[2:6:3]]
)
def test_vision_variant_agrees_with_transformers(name: str, ops: str, tmp_path: Path) -> None:
    variant = SEEING[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": ADDED_TOKENS}))
    config = write_checkpoint(tmp_path, variant["config"])
    vision = config.vision
    assert vision is not None
    shapes = {name: list(shape) for name, shape in declare_model(config)[1].shapes().items() if variants.is_first(name)}
    assert shapes == variant["shapes"]
    plan = {"native": {"threads": 2}, "reference": {"plan": "eager"}}[ops]
    runner, _ = make_seeing_runner(tmp_path, ops=ops, max_model_len=128, num_kv_blocks=40, **plan)
    encoder = encoder_of(runner)
    assert encoder is not None
    sees_all = vision.sees_whole_units
    units, encodes, pixels, row = [], [], {}, 3
    for index, given in enumerate(variant["units"]):
        frames, height, width = given["frames"], given["height"], given["width"]
        num_tokens = vision.num_tokens_of(height * vision.spatial_merge_size, width * vision.spatial_merge_size)
        place = (given["start"], num_tokens, height, width, given["time"], given["is_continued"])
        unit = MediaUnit(index, 0, *place, sees_all)
        grid = (height * vision.spatial_merge_size, width * vision.spatial_merge_size)
        units.append(unit)
        encodes.append(Encode(hash_of(str(index)), row, unit.num_tokens, *grid, "media-0", SlabHandle(0, 0, 0, 0)))
        pixels[hash_of(str(index))] = pixels_of(frames, *grid, vision.patch_size)
        row += unit.num_tokens
    encoder.run(EncoderCall(1, encodes, 0, vision.num_passes, vision.num_passes), pixels)
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    sequences = [ServedSequence(variant["prompt_token_ids"], sampling, len(variant["greedy_token_ids"])) for _ in range(2)]
    for sequence, chunk in zip(sequences, (512, 7), strict=True):
        sequence.units, sequence.unit_rows = tuple(units), [encode.first_row for encode in encodes]
        sequence.unit_hashes = tuple(encode.unit_hash for encode in encodes)
        serving = Serving(runner, chunk=chunk)
        serving.place(sequence, 1)
        if sees_all and chunk < 512:
            cut_at_units(serving, sequence)
        serving.run([sequence])
    check(variant, *sequences)


def check(variant: dict[str, Any], whole: ServedSequence, chunked: ServedSequence) -> None:
    assert whole.outputs == variant["greedy_token_ids"]
    for (ids, found), expected in zip(whole.tops, variant["top_logprobs"], strict=True):
        np.testing.assert_allclose(found, [value for _, value in expected], atol=1e-3)
        assert ids[0] == expected[0][0]
    assert chunked.answer() == whole.answer()
