"""The copying model follows its walk, and its prompts contain the stated part of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from engine.messages import SamplingParams
from tests.workers.checkpoints import TINY, write_config, write_safetensors
from tests.workers.serving import ServedSequence, Serving, make_runner
from tools.bench.copying import QUOTED, prompt_of
from tools.bench.copying_model import copying, walk_of
from tools.bench.shape import tensors

WALK = walk_of(np.arange(5000) >= 3, 0)


def test_the_answer_is_the_walk(tmp_path: Path) -> None:
    config = write_config(tmp_path, {**TINY, "hidden_size": 64, "vocab_size": 200, "tie_word_embeddings": False})
    is_text = np.arange(200) % 7 != 0
    walk = walk_of(is_text, 1)
    assert sorted(walk) == np.flatnonzero(is_text).tolist()
    bits = dict(tensors(config, 1, is_text, copying(walk)))
    write_safetensors(
        tmp_path / "model.safetensors", {name: (each.astype(np.uint32) << 16).view(np.float32) for name, each in bits.items()}
    )
    runner = make_runner(tmp_path, max_model_len=64, num_kv_blocks=16, max_num_seqs=4)
    serving, sequence = Serving(runner), ServedSequence(walk[[5, 9, 30]].tolist(), SamplingParams(temperature=0.0), 20)
    serving.place(sequence, 0)
    serving.run([sequence])
    assert sequence.outputs == walk[31:51].tolist()


@pytest.mark.parametrize("kind", ["edit", "quote", "trap", "random"])
def test_prompts(kind: str) -> None:
    prompt = prompt_of(kind, WALK, 240, np.random.default_rng(3))
    ahead = np.roll(WALK, -WALK.tolist().index(prompt[-1])).tolist()
    follower = dict(zip(ahead, np.roll(ahead, -1).tolist(), strict=True))
    body = prompt[:-1]
    num_walked = sum(follower[first] == second for first, second in pairwise(body))
    if kind == "edit":
        assert sum(one != other for one, other in zip(body, ahead, strict=False)) == 15
    elif kind == "quote":
        assert body[:QUOTED] == ahead[:QUOTED]
        assert body[QUOTED : 2 * QUOTED] == ahead[2 * QUOTED : 3 * QUOTED]
    elif kind == "trap":
        pairs = {(body[place], body[place + 1]): body[place + 2] for place in range(0, len(body), 3)}
        answer = ahead[: len(pairs) + 2]
        for first, second, third in zip(answer, answer[1:], answer[2:], strict=False):
            assert pairs[first, second] != third
    else:
        assert num_walked < 3
    assert len(body) == 240
