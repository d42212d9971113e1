"""Compares the bytes of answers of recurrent models over HTTP where states are cut, kept and replayed:

python -m tests.workers.variants.check_states [--model NAME ...] [--jobs N]

The reference answers one request at a time, each prompt whole, with nothing cached. Beside it: an engine for each chunk size
from 1 to 64; a prompt that is warm up to each boundary of its blocks; and predictions of which 0 to 4 tokens are accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.engine_process import OPERATOR, EngineProcess
from tests.waiting import WATCHDOG_S
from tests.workers.checkpoints import write_checkpoint
from tests.workers.variants.check_identity import MODELS

NAMES = ("qwen3_5", "lfm2", "granitemoehybrid")
VOCABULARY, NUM_PROMPT, NUM_OUTPUTS, SIZE, NUM_DRAFTS = 1024, 66, 40, 4, 4
OPTIONS = ("--max-model-len", "400", "--dtype", "float32", "--threads", "1", "--block-size", str(SIZE))
COLD = (*OPTIONS, "--no-enable-prefix-caching")
DRAFTS = ("--speculative-config", f'{{"method": "ngram", "num_speculative_tokens": {NUM_DRAFTS}, "adaptive": false}}')

Body = dict[str, Any]


def write(model: str, place: Path) -> Path:
    """Write a model with random weights, each token a word, and a chat template that adds nothing."""
    write_checkpoint(place, MODELS[model])
    same = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": f"<{number}>", "special": True, **same} for number in range(VOCABULARY)]
    words = {"type": "WordLevel", "vocab": {each["content"]: each["id"] for each in added}, "unk_token": "<0>"}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    (place / "tokenizer.json").write_text(json.dumps({"version": "1.0", **parts, "added_tokens": added, "model": words}))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return place


def bodies() -> list[Body]:
    """Return a greedy chat and a seeded one."""
    rng = random.Random(3)
    prompts = (text_of([rng.randrange(3, VOCABULARY) for _ in range(NUM_PROMPT)]) for _ in range(2))
    common = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    return [
        {"messages": [{"role": "user", "content": prompt}], **common, **sampling}
        for prompt, sampling in zip(prompts, ({"temperature": 0}, {"temperature": 1.2, "seed": 8}), strict=True)
    ]


def text_of(token_ids: list[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def ask(engine: EngineProcess, body: Body) -> dict[str, Any]:
    answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=WATCHDOG_S).raise_for_status()
    return dict(answer.json())


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert json.dumps(found["choices"]) == json.dumps(expected["choices"]), "the answer differs"


def check_chunk(place: Path, chunk: int, expected: list[dict[str, Any]]) -> None:
    options = ("--max-num-batched-tokens", str(chunk), "--max-num-seqs", str(min(chunk, 2)))
    with EngineProcess(place, *COLD, *options) as engine, ThreadPoolExecutor(2) as pool:
        for found, wanted in zip(pool.map(lambda body: ask(engine, body), bodies()), expected, strict=True):
            check(found, wanted)


def check_boundaries(place: Path, options: tuple[str, ...], expected: list[dict[str, Any]]) -> None:
    """Each beginning of a prompt that ends one token behind a boundary leaves the state there."""
    with EngineProcess(place, *OPTIONS, *options) as engine:
        for body, wanted in zip(bodies(), expected, strict=True):
            prompt = body["messages"][0]["content"].replace("><", "> <").split()
            for boundary in range(SIZE, NUM_PROMPT, SIZE):
                httpx.post(f"{engine.url}/admin/reset_prefix_cache", json={}, timeout=WATCHDOG_S, headers=OPERATOR)
                before = {"role": "user", "content": "".join(prompt[: boundary + 1])}
                ask(engine, body | {"messages": [before], "max_tokens": 1})
                found = ask(engine, body)
                num_cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert num_cached == boundary, f"{num_cached} tokens are cached, not {boundary}"
                check(found, wanted)
            check(ask(engine, body), wanted)


def check_drafts(place: Path, options: tuple[str, ...], expected: list[dict[str, Any]]) -> None:
    """Predictions have a wrong token after each so many right ones. Count how many were accepted in each row."""
    with EngineProcess(place, *OPTIONS, *DRAFTS, *options) as engine:
        for body, wanted in zip(bodies(), expected, strict=True):
            right = wanted["choices"][0]["token_ids"]
            for num_right in range(2, NUM_DRAFTS + 6):
                wrong = [
                    (token + 1) % VOCABULARY if at % num_right == num_right - 1 else token for at, token in enumerate(right)
                ]
                check(ask(engine, body | {"prediction": {"type": "content", "content": text_of(wrong)}}), wanted)
        num_rows = engine.metric("spec_decode_num_drafts_total")
        reached = [
            engine.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) for place in range(NUM_DRAFTS)
        ]
    exactly = [before - after for before, after in zip([num_rows, *reached], [*reached, 0], strict=True)]
    assert all(exactly), f"rows by number of accepted drafts: {exactly}"


def checks(place: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    with EngineProcess(place, *COLD) as engine:
        expected = [ask(engine, body) for body in bodies()]
    for chunk in range(1, 65):
        yield f"chunks of {chunk}", lambda chunk=chunk: check_chunk(place, chunk, expected)
    for options in ((), ("--max-num-batched-tokens", "7"), DRAFTS):
        yield f"boundaries {' '.join(options)}", lambda options=options: check_boundaries(place, options, expected)
    for options in ((), ("--max-num-batched-tokens", "7", "--max-num-seqs", "2")):
        yield f"drafts {' '.join(options)}", lambda options=options: check_drafts(place, options, expected)


def problem(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc(limit=-2)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=list(NAMES), choices=list(MODELS))
    parser.add_argument("--jobs", type=int, default=2, help="engines at a time")
    options = parser.parse_args()
    num_checked = num_failed = 0
    for model in options.model:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
            names, found = zip(*checks(write(model, Path(folder, model))), strict=True)
            for name, text in zip(names, pool.map(problem, found), strict=True):
                num_checked, num_failed = num_checked + 1, num_failed + bool(text)
                print(f"{model} {name}: {text or 'same bytes'}", flush=True)
    print(f"{num_checked} engines, {num_failed} differ")
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
