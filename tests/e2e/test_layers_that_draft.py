"""An engine with layers that draft (MTP): answers do not change with its worker's deaths, its cache or its weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import httpx

from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.test_chaos import PAIRS, VICTIMS, Deltas, kill_in_turn, kill_while_it_reloads
from tests.e2e.workload import Answer, answers, mixed_bodies, stream_all
from tests.waiting import WATCHDOG_S
from tests.workers.checkpoints import write_safetensors
from workers.weights.safetensors import SafetensorsFile

MODEL = GOLDEN / "deepseek_v3"
DRAFTS = ("--speculative-config", '{"method": "ngram,mtp", "num_speculative_tokens": 3, "adaptive": false}')
KILLS = (*((victim,) for victim in VICTIMS), *PAIRS)


def test_answers_do_not_depend_on_drafts(tmp_path: Path) -> None:
    """Streams survive kills of every actor behind the api, alone, two at once and during a reload, and of the api before they
    begin; also after sleep, a reload, and refused weights without such layers; and in a small cache, with prefix hits and all
    blocks free afterwards."""
    bodies = mixed_bodies(8, seed=5, max_tokens=120, max_prompt=90)
    with EngineProcess(MODEL, "--max-model-len", "400") as engine:
        undisturbed = answers(engine, bodies)
    with EngineProcess(MODEL, "--max-model-len", "400", "--num-kv-blocks", "90", "--restart-limit", "100", *DRAFTS) as engine:

        async def disturbed_run(killing: Callable[[Deltas], Coroutine[None, None, None]]) -> None:
            deltas = Deltas(seed=7)
            killer = asyncio.create_task(killing(deltas))
            while not killer.done():
                assert of_any_version(await stream_all(engine.url, bodies, 8, deltas.note)) == of_any_version(undisturbed)
            await killer

        asyncio.run(disturbed_run(lambda deltas: kill_in_turn(engine, deltas, KILLS)))
        assert answers(engine, bodies) == undisturbed
        for victim in VICTIMS:
            assert engine.actors()[victim]["restarts"] == sum(victim in together for together in KILLS)
        assert engine.metric("spec_decode_num_draft_tokens_total") > 0
        assert engine.metric("prefix_cache_hits_total") > 0
        asyncio.run(disturbed_run(lambda deltas: kill_while_it_reloads(engine, deltas)))
        engine.wait_for_restart("api0", engine.kill("api0"))
        for path in ("sleep", "wake", "reload"):
            assert order(engine, path).status_code == 200
        anew = answers(engine, bodies[:2])
        assert of_any_version(anew) == of_any_version(undisturbed[:2])
        reloaded = order(engine, "reload", {"path": str(without_layers(tmp_path))})
        assert reloaded.is_error
        assert "model.layers.3.eh_proj.weight [64, 128] is missing" in reloaded.text
        assert answers(engine, bodies[:2]) == anew
        engine.wait_until_idle()
        assert engine.metric("num_free_kv_blocks") == engine.metric("num_kv_blocks") == 90


def of_any_version(found: list[Answer]) -> list[Answer]:
    """Return answers without the weight version."""
    return [replace(answer, weight_version="") for answer in found]


def order(engine: EngineProcess, path: str, body: dict[str, str] | None = None) -> httpx.Response:
    return httpx.post(f"{engine.url}/admin/{path}", json=body or {}, timeout=WATCHDOG_S, headers=OPERATOR)


def without_layers(directory: Path) -> Path:
    """Write the same model without the layers that draft."""
    path = directory / "without"
    shutil.copytree(MODEL, path)
    tensors = {name: tensor.read() for name, tensor in SafetensorsFile(path / "model.safetensors").tensors.items()}
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.3.")}
    assert len(kept) < len(tensors)
    write_safetensors(path / "model.safetensors", kept)
    return path
