"""Part `served` of `tools/device/card`: engines over HTTP with `--device gpu`. The bytes of an answer are the same in all
conditions, also while actors are killed, and golden models have the tokens of transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import httpx

from engine.options.resolve_media import missing_packages
from shm.cuda_driver import DriverLibrary
from tests.devices.engines import (
    BODIES,
    CAPTURED,
    CUT,
    DRAFTS,
    LAYERS,
    LAYERS_MODEL,
    OPTIONS,
    Expected,
    beside_a_kill,
    order,
    said,
)
from tests.e2e.engine_process import EngineProcess
from tests.e2e.test_golden import TOLERANCE
from tests.e2e.workload import answers, answers_together, mixed_bodies
from tests.paths import PICTURE_MODELS, TEXT_MODELS
from tests.waiting import WATCHDOG_S
from tools.device import engines
from tools.device.card import CardError
from tools.device.engines import MODEL, Target, compared
from tools.device.findings import Finding, Findings, Outcome
from tools.device.part import Item, Plan

_KILLS, _KILLS_S = 20, 70.0  # of each actor, and the time that they may take together
# Types, and the tolerance of log-probabilities; bfloat16 has 0.21 on the emulated card, where a router chose another expert.
_DTYPES = {"float32": TOLERANCE, "bfloat16": 0.4}
_MANY, _ENGINES_AT_ONCE = 32, 4
_CHOICES = 3
_SMALL_CAPTURED = ("--plan", "captured", "--cudagraph-capture-sizes", "3")


def target_of(plan: Plan) -> Target:
    return Target("gpu", len(DriverLibrary(plan.driver, CardError).cards()))


def items(plan: Plan) -> list[Item]:
    target = target_of(plan)
    disturbed = Item("caching, choices and kills", partial(_disturbed, target, plan))
    drafts = Item("layers that draft", partial(_layers, target, plan))
    pictures = Item("golden models with pictures", partial(_pictures, target, plan))
    if plan.is_small:
        return [disturbed, drafts, pictures]  # `tests/tools/test_device_whole.py` has the others
    ways = list(engines.WAYS.values())
    found = [Item(f"the same bytes in {dtype}", partial(engines.same_bytes, target, "cuda", ways, dtype)) for dtype in _DTYPES]
    found += [disturbed, drafts, Item(f"{_MANY} requests together", lambda: _many(target))]
    found += [Item(f"golden models in {dtype}", partial(_golden, target, dtype, TEXT_MODELS)) for dtype in _DTYPES]
    return [*found, pictures]


def _pictures(target: Target, plan: Plan) -> Findings:
    if missing := missing_packages():
        yield Finding("golden models with pictures", Outcome.NOT_RUN, f"they need {' and '.join(missing)}, not installed here")
        return
    if plan.is_small:
        yield from _golden(target, "float32", PICTURE_MODELS[:1])
        return
    for dtype in _DTYPES:
        yield from _golden(target, dtype, PICTURE_MODELS)


def _golden(target: Target, dtype: str, models: Sequence[str]) -> Findings:
    """Check some models at once, because most of the time their engines start."""

    def of_model(model: str) -> list[Finding]:
        try:
            return list(engines.golden(target, "cuda", [model], dtype, _DTYPES[dtype]))
        except Exception as error:  # the other models are to run whatever it is
            return [Finding.of(f"golden {model} in {dtype}", False, f"it ended with {type(error).__name__}: {error}")]

    with ThreadPoolExecutor(_ENGINES_AT_ONCE) as pool:
        for done in as_completed([pool.submit(of_model, model) for model in models]):
            yield from done.result()


def _many(target: Target) -> Findings:
    """Compare the answers to as many requests as fit into a step, alone and together."""
    bodies = mixed_bodies(_MANY, seed=7, max_tokens=16)
    sizes = ("--max-num-seqs", str(_MANY), "--plan", "captured", "--max-cudagraph-capture-size", str(_MANY))
    with target.engine(MODEL, "cuda", *OPTIONS, *sizes, "--num-kv-blocks", "800") as engine:
        expected = said(answers(engine, bodies, concurrency=1))
        yield compared(f"the same bytes of {_MANY} requests together", expected, said(answers_together(engine, bodies)))


def _layers(target: Target, plan: Plan) -> Findings:
    """Compare the answers of captured steps with layers that draft with those without drafts, op by op."""
    bodies = [body | {"max_tokens": 4} for body in BODIES[:2]] if plan.is_small else BODIES
    with target.engine(LAYERS_MODEL, "cuda", *OPTIONS, "--plan", "eager", "--num-kv-blocks", "60") as engine:
        expected = said(answers(engine, bodies, concurrency=1))
    captured = _SMALL_CAPTURED if plan.is_small else CAPTURED
    with target.engine(LAYERS_MODEL, "cuda", *OPTIONS, *captured, *CUT, *LAYERS) as engine:
        yield compared("the same bytes with layers that draft", expected, said(answers_together(engine, bodies)))
        drafts, failed = engine.metric("spec_decode_num_draft_tokens_total"), engine.metric("uncaptured_step_sizes")
        text = f"{drafts:.0f} draft tokens, {failed:.0f} sizes could not be captured"
        yield Finding.of("layers draft in captured steps", drafts > 0 and not failed, text)


def _disturbed(target: Target, plan: Plan) -> Findings:
    """Compare the answers of an engine with captured steps and drafts with those that it gave to each request alone."""
    bodies = [body | {"max_tokens": 6} for body in BODIES[:2]] if plan.is_small else BODIES
    captured = _SMALL_CAPTURED if plan.is_small else CAPTURED
    with target.engine(MODEL, "cuda", *OPTIONS, *captured, *CUT, *DRAFTS) as engine:
        expected = said(answers(engine, bodies, concurrency=1))
        hits = engine.metric("prefix_cache_hits_total")
        yield compared("the same bytes from a warm prefix cache", expected, said(answers_together(engine, bodies)))
        num_hits = engine.metric("prefix_cache_hits_total") - hits
        yield Finding.of("the prefix cache was warm", num_hits > 0, f"{num_hits:.0f} tokens")
        drafts = engine.metric("spec_decode_num_accepted_tokens_total")
        yield Finding.of("drafts were accepted", drafts > 0 or plan.is_small, f"{drafts:.0f} tokens")
        yield _same_choices(engine)
        yield from _kills(engine, bodies, expected, plan)
        if plan.is_small:
            return  # `tests/devices/test_cuda_engine.py` has the rest
        for path in ("sleep", "wake", "reload"):
            order(engine, path)
        yield compared("the same bytes after sleep, wake and reload", expected, said(answers(engine, bodies)))


def _same_choices(engine: EngineProcess) -> Finding:
    """Return whether several choices of a seed are the same twice, and differ among each other."""
    body: dict[str, Any] = {"prompt": [5, 9, 3, 30, 22], "n": _CHOICES, "seed": 11, "temperature": 1.0, "max_tokens": 4}
    body |= {"ignore_eos": True, "return_token_ids": True}

    def ask() -> list[list[int]]:
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S).raise_for_status().json()
        return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    first, second = ask(), ask()
    is_held = first == second and len({tuple(tokens) for tokens in first}) == _CHOICES
    return Finding.of(f"the same {_CHOICES} choices of a seed", is_held, f"{first} and {second}" if not is_held else "")


def _kills(engine: EngineProcess, bodies: list[dict[str, Any]], expected: Expected, plan: Plan) -> Findings:
    """Kill the actors behind the API in turn, each while streams run. Their answers must be the same."""
    actors = ["scheduler"] if plan.is_small else [name for name in engine.actors() if not name.startswith("api")]
    until = min(time.monotonic() + _KILLS_S, plan.until - 20)
    counts, wrong = dict.fromkeys(actors, 0), dict.fromkeys(actors, "")
    for actor in itertools.islice(itertools.cycle(actors), len(actors) * (1 if plan.is_small else _KILLS)):
        if time.monotonic() > until:
            break
        disturbed = asyncio.run(beside_a_kill(engine, bodies, len(bodies), actor, restarted=(actor,)))
        finding = compared("", expected, said(disturbed))
        counts[actor] += 1
        wrong[actor] = wrong[actor] or (finding.text if finding.outcome is Outcome.MISSED else "")
    for actor, count in counts.items():
        what = f"the same bytes beside kills of {actor}"
        if count == 0:
            yield Finding(what, Outcome.NOT_RUN, "the time was up")
        else:
            yield Finding.of(what, not wrong[actor], wrong[actor] or f"{count} kills", kills=float(count))
