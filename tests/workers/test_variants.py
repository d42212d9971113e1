"""Other shapes and options of the architectures agree with transformers (`variants/`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.messages import SamplingParams
from tests.workers import variants
from tests.workers.checkpoints import write_checkpoint
from tests.workers.serving import Sample, Serving, make_runner

VARIANTS: dict[str, dict[str, Any]] = json.loads(Path(variants.__file__).with_name("variants.json").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    write_checkpoint(tmp_path, variant["config"])
    runner = make_runner(tmp_path, max_model_len=128, num_kv_blocks=40)
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    whole, chunked = (Sample(variant["prompt_token_ids"], sampling, len(variant["greedy_token_ids"])) for _ in range(2))
    for sample, chunk in ((whole, 512), (chunked, 23)):
        serving = Serving(runner, chunk=chunk)
        serving.place(sample, 1)
        serving.run([sample])
    assert whole.outputs == variant["greedy_token_ids"]
    for (ids, found), expected in zip(whole.tops, variant["top_logprobs"], strict=True):
        np.testing.assert_allclose(found, [value for _, value in expected], atol=1e-3)
        assert ids[0] == expected[0][0]
    assert chunked.answer() == whole.answer()
