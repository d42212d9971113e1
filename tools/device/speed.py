"""Part `speed` of `tools/device/card`: decoding and prefill of random weights over HTTP, as a share of the card's measured
rates; the host's time per step, and the power of an idle engine. Beside transformers where it is installed.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import uvloop

from engine.checkpoint.model_config import ModelConfig
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tools.bench import dense_shape
from tools.bench.connection import Client
from tools.bench.report import summarize
from tools.bench.serve import PATHS, Load
from tools.device import vendor
from tools.device.engines import Target
from tools.device.findings import Finding, Findings, Outcome
from tools.device.machine import power
from tools.device.operators import Setting
from tools.device.part import Item, Plan
from tools.device.rows import Roofline
from tools.device.served import target_of
from tools.target import Target as Server
from workers.models import declare_model

_LARGE = {
    **dense_shape.CONFIG,
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "max_window_layers": 36},
    **{"num_attention_heads": 32, "tie_word_embeddings": False},
}
_SHAPES = {"Qwen3-0.6B": dense_shape.CONFIG, "Qwen3-8B": _LARGE}
_HOST_TIMES = ("step_schedule", "step_dispatch", "step_sample", "step_return", "step_run")
_VOCAB, _LONGEST_S = 900, 120.0
_SETTLED_S = 2.0  # after which an engine without requests is idle


class Sizes(NamedTuple):
    """Numbers and lengths of the requests."""

    concurrencies: tuple[int, ...]
    input_len: int
    output_len: int
    prefills: tuple[int, ...]
    options: tuple[str, ...]


_SIZES = Sizes((1, 16, 64, 256), 128, 64, (512, 2048, 8192), ("--max-model-len", "8448", "--max-num-seqs", "256"))
_SMALL_SIZES = Sizes((2,), 5, 3, (7,), ("--max-model-len", "64", "--max-num-seqs", "2", "--num-kv-blocks", "40"))


class Needs(NamedTuple):
    """Bytes and arithmetic that a model needs at least."""

    weight_bytes: int  # read by each step, in bfloat16
    numbers: int  # multiplied with each position
    cached_bytes: int  # of a position

    @staticmethod
    def of(path: Path) -> Needs:
        model = ModelConfig.read(path)
        shapes = declare_model(model)[1].shapes()
        embedded = math.prod(shapes["model.embed_tokens.weight"])
        read = sum(map(math.prod, shapes.values())) - (0 if model.tie_word_embeddings else embedded)
        config = json.loads((path / "config.json").read_text())
        cached = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        return Needs(2 * read, read - embedded, cached)


def items(plan: Plan) -> list[Item]:
    setting = Setting(plan)
    if plan.is_small:
        config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
        return [Item("small", partial(_served, setting, "small", config, _SMALL_SIZES))]
    (first, config), *_ = _SHAPES.items()
    eager = _SIZES._replace(concurrencies=(1,), prefills=(), options=(*_SIZES.options, "--plan", "eager"))
    found = [Item(name, partial(_served, setting, name, config, _SIZES)) for name, config in _SHAPES.items()]
    found.append(Item(f"transformers, {first}", lambda: _transformers(first, config, _SIZES)))
    return [*found, Item(f"{first}, op by op", partial(_served, setting, f"{first}, op by op", config, eager))]


def _served(setting: Setting, name: str, config: dict[str, Any], sizes: Sizes) -> Findings:
    roofline = setting.roofline  # before an engine has the memory
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(config))
        begin, needs = time.monotonic(), Needs.of(path)
        with _engine(setting.plan, path, "--load-format", "dummy", *sizes.options) as engine:
            yield Finding.of(f"{name}: started", True, f"in {time.monotonic() - begin:.1f} s")
            for concurrency in sizes.concurrencies:
                yield _decoded(engine, name, sizes, concurrency, needs, roofline)
            yield from _host_times(engine, name)
            for length in sizes.prefills:
                yield _prefilled(engine, name, length, needs, roofline)
            if not setting.plan.is_small:
                time.sleep(_SETTLED_S)
            yield from power(f"with an idle engine, {name}")


def _engine(plan: Plan, path: Path, *options: str) -> EngineProcess:
    """Return an engine on the card; on the CPU where the card is emulated, since this part sees engines from outside only."""
    target, ops = (Target("cpu", 0), "native") if plan.is_small else (target_of(plan), "cuda")
    return target.engine(path, ops, *options)


def _asked(engine: EngineProcess, concurrency: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Return the result of as many requests as are open at once, after one that is not counted. RuntimeError if one failed."""
    rng = random.Random(time.time_ns())  # no prompt is cached
    bodies = []
    for _ in range(concurrency + 1):
        body = {"prompt": [rng.randrange(3, _VOCAB) for _ in range(input_len)], "max_tokens": output_len, "ignore_eos": True}
        bodies.append(orjson.dumps({**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}))
    found = uvloop.run(_run(engine.url, concurrency, bodies))
    if found["errors"]:
        raise RuntimeError(f"{concurrency} requests of {input_len} tokens: {found['errors'][0]}")
    return found


async def _run(url: str, concurrency: int, bodies: list[bytes]) -> dict[str, Any]:
    client = Client(Server.parse(url), _LONGEST_S)
    try:
        for requests in (bodies[:1], bodies[1:]):
            load = Load(client, PATHS["completions"], requests, lambda: None)
            await load.in_waves(concurrency)
    finally:
        client.close()
    return summarize(load.timelines, load.wall_s, load.cpu_s)


def _decoded(engine: EngineProcess, name: str, sizes: Sizes, concurrency: int, needs: Needs, roofline: Roofline) -> Finding:
    found = _asked(engine, concurrency, sizes.input_len, sizes.output_len)
    rate = found["decode_tokens_per_s"] or found["output_tokens_per_s"]
    num_bytes = needs.weight_bytes + concurrency * (sizes.input_len + sizes.output_len // 2) * needs.cached_bytes
    share = num_bytes / roofline.num_bytes * rate / concurrency
    first_ms = found["ttft_ms"]["p50"]
    text = f"{rate:.1f} tokens per second, {share:.2f} of what bandwidth allows, first token after {first_ms:.1f} ms"
    return Finding.of(f"{name}: decode, {concurrency} streams", True, text, tokens_per_s=rate, share_of_bandwidth=share)


def _prefilled(engine: EngineProcess, name: str, length: int, needs: Needs, roofline: Roofline) -> Finding:
    seconds = _asked(engine, 1, length, 1)["ttft_ms"]["p50"] / 1000
    share = 2 * needs.numbers * length / roofline.operations["bfloat16"] / seconds
    text = f"{length / seconds:.0f} tokens per second, {share:.2f} of what arithmetic allows, {1000 * seconds:.1f} ms"
    return Finding.of(f"{name}: prefill of {length}", True, text, tokens_per_s=length / seconds, share_of_arithmetic=share)


def _host_times(engine: EngineProcess, name: str) -> Findings:
    values = {}
    for each in _HOST_TIMES:
        count = engine.metric(f"{each}_seconds_count")
        values[f"{each}_us"] = 1e6 * engine.metric(f"{each}_seconds_sum") / max(count, 1)
    text = ", ".join(f"{key.removesuffix('_us')} {value:.0f} us" for key, value in values.items())
    yield Finding.of(f"{name}: mean times of a step", True, text, **values)


def _transformers(name: str, config: dict[str, Any], sizes: Sizes) -> Findings:
    try:
        model = vendor.Transformers(config)
    except ImportError as error:
        yield Finding(f"transformers, {name}", Outcome.NOT_RUN, str(error))
        return
    for count in sizes.concurrencies:
        rate = count / model.step_s(count, sizes.input_len, sizes.output_len)
        text = f"{rate:.1f} tokens per second: {model.text}"
        yield Finding.of(f"transformers, {name}: decode, {count} streams", True, text, tokens_per_s=rate)
    for length in sizes.prefills:
        rate = length / model.prefill_s(length)
        text = f"{rate:.0f} tokens per second: {model.text}"
        yield Finding.of(f"transformers, {name}: prefill of {length}", True, text, tokens_per_s=rate)
