"""Other shapes and options of the architectures agree with transformers (`tests/golden/drawn`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.families import FAMILIES
from engine.messages import SamplingParams
from tests.paths import DRAWN, GOLDEN, RECURRENT_MODELS
from tests.pooled import MODELS
from tests.workers import variants
from tests.workers.checkpoints import write_checkpoint
from tests.workers.seeing import cut_at_units, encode_units, make_seeing_runner
from tests.workers.serving import ServedSequence, Serving, make_runner
from workers.models import declare_model

VARIANTS: dict[str, dict[str, Any]] = json.loads((DRAWN / "variants.json").read_text())
SEEING: dict[str, dict[str, Any]] = json.loads((DRAWN / "seeing.json").read_text())
ADDED_TOKENS = {"7": {"content": "[IMG_BREAK]"}, "4": {"content": "[IMG_END]"}}
PROCESSOR = {"rescale_factor": 1 / 255, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.26, 0.27]}


def test_every_family_has_a_golden_shape() -> None:
    configs = [each["config"] for part in (VARIANTS, SEEING, MODELS) for each in part.values()]
    configs += [json.loads(path.read_text()) for path in GOLDEN.glob("**/config.json")]
    assert set(FAMILIES) == {config["model_type"] for config in configs}


def test_golden_files_take_at_most_24_mb() -> None:
    files = (path for path in GOLDEN.rglob("*") if path.is_file() and not path.is_symlink() and path.suffix != ".pyc")
    assert sum(path.stat().st_size for path in files) < 24e6


# those with the name of a golden model are compared by `tests/e2e/test_golden.py`
@pytest.mark.parametrize("name", [name for name in VARIANTS if f"recurrent/{name}" not in RECURRENT_MODELS])
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
    units, rows, hashes = encode_units(runner, vision, variant["units"])
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    sequences = [ServedSequence(variant["prompt_token_ids"], sampling, len(variant["greedy_token_ids"])) for _ in range(2)]
    for sequence, chunk in zip(sequences, (512, 7), strict=True):
        sequence.units, sequence.unit_rows, sequence.unit_hashes = units, list(rows), hashes
        serving = Serving(runner, chunk=chunk)
        serving.place(sequence, 1)
        if vision.sees_whole_units and chunk < 512:
            cut_at_units(serving, sequence)
        serving.run([sequence])
    check(variant, *sequences)


@pytest.mark.parametrize("ops", [{}, {"ops": "reference", "plan": "eager"}], ids=("native", "reference"))
def test_gemma4_computes_media_tokens_of_text_as_padding(ops: dict[str, Any], tmp_path: Path) -> None:
    """In a prompt and in an answer: after each, log-probabilities are those after the padding token."""
    config = write_checkpoint(tmp_path, next(each["config"] for name, each in SEEING.items() if name.startswith("gemma4 pict")))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    ((image, padding), *_) = config.same_inputs
    runner, _ = make_seeing_runner(tmp_path, max_model_len=128, num_kv_blocks=40, **ops)

    def run(prompt: list[int], num_outputs: int, **options: Any) -> ServedSequence:
        sequence = ServedSequence(prompt, SamplingParams(temperature=0.0, num_prompt_logprobs=3, **options), num_outputs)
        serving = Serving(runner, chunk=4)
        serving.place(sequence, 1)
        serving.run([sequence])
        return sequence

    text = [12, 30, 17, 25, 21]
    generated = run(text, 3, allowed_token_ids=(image,))
    assert generated.outputs == [image] * 3
    typed, padded = (run([*text, *[token] * 3, 40, 41], 4, num_logprobs=3) for token in (image, padding))
    assert (typed.outputs, typed.tops) == (padded.outputs, padded.tops)
    assert typed.prompt_logprobs[9] == padded.prompt_logprobs[9]
    assert typed.prompt_logprobs[5] != padded.prompt_logprobs[5]  # the token itself is what it is
    resumed = run([*text, *generated.outputs, 40, 41], 4, num_logprobs=3)
    assert resumed.answer() == typed.answer()


def check(variant: dict[str, Any], whole: ServedSequence, chunked: ServedSequence) -> None:
    assert whole.outputs == variant["greedy_token_ids"]
    for (ids, found), expected in zip(whole.tops, variant["top_logprobs"], strict=True):
        np.testing.assert_allclose(found, [value for _, value in expected], atol=1e-3)
        assert ids[0] == expected[0][0]
    assert chunked.answer() == whole.answer()
