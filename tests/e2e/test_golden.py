"""Golden outputs of a third party (transformers, float32) over HTTP, in every condition that must not change them."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.workload import answers_together
from tests.paths import RECURRENT_MODELS

TOLERANCE = 1e-3

CONDITIONS = {
    "plain": ("--max-num-batched-tokens", "512"),
    "chunked": ("--max-num-batched-tokens", "16", "--max-num-seqs", "8"),
    # 100 blocks of 4 hold the longest case (324 positions), not two of them; each answer grows by 6: the load preempts
    "preempted": ("--block-size", "4", "--num-kv-blocks", "100", "--no-enable-prefix-caching"),
}


# An engine each: one model in every condition, since what makes a condition (the scheduler, the cache) knows no models; one of
# each kind of layers in one. `tests/workers/test_golden.py` has every model's runner in every way to cut and repeat the work.
SERVED = [("qwen3", condition) for condition in CONDITIONS]
SERVED += [("llama", "plain"), ("qwen3_moe", "plain"), ("deepseek_v3", "chunked"), ("ernie4_5_moe", "preempted")]
SERVED += zip(RECURRENT_MODELS[::4], itertools.cycle(CONDITIONS), strict=False)


def golden_cases(architecture: str) -> list[dict[str, Any]]:
    return list(json.loads((GOLDEN / architecture / "golden.json").read_text())["cases"])


@pytest.fixture(scope="module", params=SERVED, ids=lambda p: f"{p[0]}-{p[1]}")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, EngineProcess]]:
    architecture, condition = request.param
    options = ("--dtype", "float32", "--max-model-len", "400", *CONDITIONS[condition])
    with EngineProcess(GOLDEN / architecture, *options) as engine:
        yield architecture, condition, engine


def picture_link(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def with_pictures(architecture: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a case with its pictures, if any."""
    links = [picture_link((GOLDEN / architecture / name).read_bytes()) for name in case.get("images", ())]
    return body_of(case) | ({"multi_modal_data": {"image": links}} if links else {})


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": case["prompt_token_ids"],
        "max_tokens": len(case["greedy_token_ids"]),
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
    }


def test_one_by_one_with_logprobs(served: tuple[str, str, EngineProcess]) -> None:
    """Twice each in one model: the second time the prefix cache is warm (where it is on)."""
    architecture, condition, engine = served
    for case in golden_cases(architecture) * (2 if architecture == "qwen3" else 1):
        body = body_of(case) | ({"prompt_logprobs": 2} if case.get("prompt_logprobs") else {})
        choice = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120).raise_for_status().json()["choices"][0]
        assert choice["token_ids"] == case["greedy_token_ids"]
        for got, best, expected in zip(
            choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], case["top_logprobs"], strict=True
        ):
            assert got == pytest.approx(expected[0][1], abs=TOLERANCE)
            assert sorted(best.values(), reverse=True)[:5] == pytest.approx([value for _, value in expected], abs=TOLERANCE)
        if case.get("prompt_logprobs"):
            check_prompt_logprobs(choice["prompt_logprobs"], case)
    if (architecture, condition) == ("qwen3", "plain"):
        assert engine.metric("prefix_cache_hits_total") > 0


def check_prompt_logprobs(got: list[dict[str, Any] | None], case: dict[str, Any]) -> None:
    assert got[0] is None
    for token_id, entry, expected in zip(case["prompt_token_ids"][1:], got[1:], case["prompt_logprobs"][1:], strict=True):
        assert entry is not None
        assert entry[str(token_id)]["logprob"] == pytest.approx(expected, abs=TOLERANCE)
        assert len(entry) in (2, 3)


def test_thirty_two_at_once(served: tuple[str, str, EngineProcess]) -> None:
    architecture, condition, engine = served
    cases = (golden_cases(architecture) * 7)[:32]
    for case, answer in zip(cases, answers_together(engine, [body_of(case) for case in cases]), strict=True):
        assert answer.token_ids == case["greedy_token_ids"]
        assert answer.token_logprobs == pytest.approx([best[0][1] for best in case["top_logprobs"]], abs=TOLERANCE)
    if condition == "preempted":
        assert engine.metric("num_preemptions_total") > 0
