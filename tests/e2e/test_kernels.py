"""The kernels of an engine are chosen once: a restarted worker uses those of its run, a later start the stored choice. With any
pinned kernels an engine keeps its guarantees. `tests/workers/test_kernels.py` compares each with transformers.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from ops import _cpu
from ops.cpu.choice import TIMED, kernels_of
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.precisions import PRECISIONS
from tests.e2e.test_chaos import kill_together
from tests.e2e.test_observation import tokamak
from tests.e2e.workload import Answer, answers, answers_together, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S
from workers.devices.kernels import Timing

BODIES = mixed_bodies(4, seed=5, max_tokens=80, max_prompt=40)
OPTIONS = ("--max-model-len", "400", "--dtype", "float32", "--kv-cache-dtype", "float32")

# A model and precision for each variant: where it multiplies differently from its base, and among them every precision and kind
# of layers. All other pairs are in `tests/workers/test_kernels.py`, in one process,
# and so are the variants that the engines leave out.
NARROW = {
    "portable": ("qwen3_moe", "int8"),
    "wide": ("qwen3", "int4"),
    "amxemulated": ("deepseek_v3", "bfloat16"),
    "avx2": ("qwen3", "int4"),
    "avxvnni": ("qwen3_moe", "int8"),
    "avx512": ("deepseek_v3", "int4"),
    "avx512bf16": ("qwen3", "bfloat16"),
    "amx": ("qwen3_moe", "bfloat16"),
}


def kernels_in(path: Path) -> dict[str, str]:
    """Return the kernels that a start with float32 keys and values takes from a file."""
    found = msgspec.json.decode(path.read_bytes(), type=Timing)
    return kernels_of(found.chosen, _cpu.candidates()[-1], "float32")


def put_another(path: Path) -> None:
    """Write the choice of a machine on which the kernels that were chosen here are the slowest."""
    found = msgspec.json.decode(path.read_bytes(), type=Timing)
    variants = list(next(iter(found.seconds.values()), {found.chosen["int8"]: []}))
    others = {part: next((name for name in variants if name != found.chosen[part]), found.chosen[part]) for part in TIMED}
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, chosen=others)))


async def disturbed(engine: EngineProcess) -> list[Answer]:
    """Return answers during which the worker dies."""
    has_begun = asyncio.Event()  # a number of deltas may never come: a process that is held up sends many tokens in one
    streams = asyncio.create_task(stream_all(engine.url, BODIES, len(BODIES), has_begun.set))
    await asyncio.wait_for(has_begun.wait(), timeout=WATCHDOG_S)
    await asyncio.to_thread(kill_together, engine, ("worker0",))
    return await streams


def test_chosen_once(tmp_path: Path) -> None:
    """The first start chooses. Its worker keeps that choice even if the file changes; a later start takes the file's choice
    even if it would find other kernels faster."""
    options = (*OPTIONS, "--weight-cache-dir", str(tmp_path))
    with EngineProcess(GOLDEN / "qwen3", *options) as engine:
        (path,) = tmp_path.glob("kernels-*.json")
        config = engine.run.manifest().config
        assert config.cpu_kernels == kernels_in(path)
        assert json.loads(tokamak("top", "--run", config.run_id, "--json"))["run"]["cpu_kernels"] == config.cpu_kernels
        assert f"kernels   {config.kernels_text}"[:80] in tokamak("top", "--run", config.run_id, "--once")
        undisturbed = answers(engine, BODIES)
        put_another(path)
        kept = path.read_bytes()
        assert asyncio.run(disturbed(engine)) == undisturbed
        with EngineProcess(GOLDEN / "qwen3", *options, "--no-weight-cache") as later:
            assert later.run.manifest().config.cpu_kernels == kernels_in(path)
        assert path.read_bytes() == kept
        path.unlink()
        assert asyncio.run(disturbed(engine)) == undisturbed
        assert not path.exists()
        assert kernels_said(engine) == [config.kernels_text] * 3
        assert engine.run.manifest().config == config


@pytest.mark.parametrize("variant", dict.fromkeys([*_cpu.variants()[::3], _cpu.candidates()[-1]]))
def test_pinned(variant: str) -> None:
    """An answer's bytes are the same alone, together, and across a death of the worker, which takes the same kernels again."""
    pinned = ("--max-model-len", "400", "--cpu-kernels", variant)
    model, precision = NARROW[variant]
    with EngineProcess(GOLDEN / model, *pinned, *PRECISIONS[precision]) as engine:
        alone = answers(engine, BODIES, concurrency=1)
        assert answers_together(engine, BODIES) == alone
        assert asyncio.run(disturbed(engine)) == alone
        assert kernels_said(engine) == [variant] * 2


def kernels_said(engine: EngineProcess) -> list[str]:
    """Return the kernels that each life of the worker logged."""
    lines = engine.run.log_path("worker0").read_text().splitlines()
    return [line.partition(" kernels: ")[2] for line in lines if " kernels: " in line]
