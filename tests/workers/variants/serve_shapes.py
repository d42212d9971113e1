"""Serves the checkpoints that random_shapes.py made over HTTP and compares the answers with those of transformers:

python -m tests.workers.variants.serve_shapes OUT ... [--family NAME ...] [--count N] [--jobs N] [--results FILE]

Each checkpoint is served plain and with everything at once: two ranks, chunks of 16, draft tokens. Each request is sent
twice; the second answer comes from the cache. Where something differs, the parts are tried one by one; where two ranks
cannot share the heads, the other parts. A checkpoint that is in the results already is not served again.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from engine.checkpoint.model_config import ModelConfig
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.golden.make_units import pixels_of
from tests.workers.variants.check_shapes import TOLERANCE, checkpoints

CHUNK = 16
PARTS: dict[str, tuple[str, ...]] = {
    "chunks": ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"),
    "ranks": ("--tensor-parallel-size", "2", "--threads", "1"),
    "drafts": ("--speculative-config", '{"method": "ngram,suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'),
}
ALL = "+".join(PARTS)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def problems(place: Path) -> dict[str, str]:
    """Return what differs or is refused, by the parts in use; empty: nothing."""
    for name in TOKENIZER:
        if not (place / name).exists():
            shutil.copyfile(GOLDEN / "llama" / name, place / name)
    found = {way: _problem(place, tuple(filter(None, way.split("+")))) for way in ("", ALL)}
    if is_refusal(found[ALL]):
        found["chunks+drafts"] = _problem(place, ("chunks", "drafts"))
    elif found[ALL] and not found[""]:
        found |= {part: _problem(place, (part,)) for part in PARTS}
    return {way or "plain": text for way, text in found.items() if text}


def is_refusal(text: str) -> bool:
    """Say whether two ranks cannot share the heads."""
    return "error: --tensor-parallel-size" in text


def _problem(place: Path, parts: tuple[str, ...]) -> str:
    expected = json.loads((place / "expected.json").read_text())
    options = ["--dtype", "float32", "--kv-cache-memory", "16MiB", "--no-weight-cache"]
    request = expected.get("request", expected)
    route, body = "/v1/completions", {"prompt": request["prompt_token_ids"], "logprobs": 3}
    if request is not expected:
        content = _content(place, request)
        route, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "logprobs": True}
    body |= {"max_tokens": len(request["greedy_token_ids"]), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    options += (option for part in parts for option in PARTS[part])
    if "chunks" in parts and (longest := _longest_unit(place, request)) > CHUNK:
        options += ("--max-num-batched-tokens", str(longest))
    engine = EngineProcess(place, *options)
    try:
        with engine:
            answers = [httpx.post(f"{engine.url}{route}", json=body, timeout=120) for _ in range(2)]
    except AssertionError as error:
        engine.close()
        return (engine.text or str(error)).strip().rpartition("\n")[2]
    finally:
        engine.close()
    for answer in answers:
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text}"
        if found := _difference(answer.json(), request):
            return found
    return "" if answers[0].json()["choices"] == answers[1].json()["choices"] else "the cache changes the answer"


def _content(place: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message: text by the names of tokens, and pictures of the sizes of the units."""
    vision = ModelConfig.read(place).vision
    assert vision is not None
    content: list[dict[str, Any]] = []
    num_around = int(vision.kind == "gemma3")  # a paragraph before and after
    next_token, tokens = 0, request["prompt_token_ids"]
    for unit in request["units"]:
        grid = (unit["height"] * vision.spatial_merge_size, unit["width"] * vision.spatial_merge_size)
        content.append({"type": "text", "text": _text(tokens[next_token : unit["start"] - 1 - num_around])})
        file = io.BytesIO()
        Image.fromarray(pixels_of(1, *grid, vision.patch_size)[0]).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
        next_token = unit["start"] + vision.num_tokens_of(*grid) + 1 + num_around
    return [*content, {"type": "text", "text": _text(tokens[next_token:])}]


def _longest_unit(place: Path, request: dict[str, Any]) -> int:
    """Return the tokens of the largest picture that must be computed in one step; 0: none must."""
    vision = ModelConfig.read(place).vision
    if vision is None or not vision.sees_whole_units:
        return 0
    return max(unit["height"] * unit["width"] for unit in request["units"])


def _text(token_ids: list[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def _difference(answer: dict[str, Any], expected: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or expected["prompt_token_ids"]
    if prompt != expected["prompt_token_ids"]:
        return f"prompt {prompt}, expected {expected['prompt_token_ids']}"
    if choice["token_ids"] != expected["greedy_token_ids"]:
        return f"tokens {choice['token_ids']}, expected {expected['greedy_token_ids']}"
    wanted = np.array([tops[0][1] for tops in expected["top_logprobs"]])
    logprobs = choice["logprobs"]
    given = logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs["content"]]
    largest = float(np.abs(np.array(given) - wanted).max())
    return f"log-probabilities differ by {largest:.2g}" if largest > TOLERANCE else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--count", type=int, default=1000, help="checkpoints of each family and directory")
    parser.add_argument("--jobs", type=int, default=2, help="checkpoints served at a time")
    parser.add_argument("--results", type=Path, help="file to which a JSON line is added for each checkpoint")
    options = parser.parse_args()
    places = [place for out in options.out for place in checkpoints(out, options.family, options.count)]
    found: dict[str, dict[str, str]] = {}
    if options.results is not None and options.results.exists():
        found = dict(json.loads(line) for line in options.results.read_text().splitlines())
    left = [place for place in places if str(place) not in found]
    with ThreadPoolExecutor(options.jobs) as pool:
        for place, problem in zip(left, pool.map(problems, left), strict=True):
            found[str(place)] = problem
            for way, text in problem.items():
                print(f"{place.name} {way}: {text}", flush=True)
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps([str(place), problem]) + "\n")
    failed = [place for place in places if not all(map(is_refusal, found[str(place)].values()))]
    print(f"{len(places)} checkpoints, {len(failed)} differ")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
