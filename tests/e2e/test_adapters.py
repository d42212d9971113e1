"""LoRA adapters in a whole engine, chosen by model name: each answer is the same alone, together, and while adapters come and
go and processes are killed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.adapters import write_adapter
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.workload import Answer, Body, answers, held, mixed_bodies, stream_all, stream_one, wait_for_waiting
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
OPTIONS = ("--max-model-len", "1200", "--restart-limit", "100", "--served-model-name", "base")
NAMES = ("base", "a0", "a1", "a2", "a3")
BODIES = mixed_bodies(16, seed=61, max_tokens=24, max_prompt=120)
LONG: Body = {**mixed_bodies(1, seed=62, max_tokens=1000, max_prompt=5)[0], "prompt": [5, 6, 7]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four adapters, a fifth, and an invalid one."""
    directory = tmp_path_factory.mktemp("adapters")
    for number in range(5):
        write_adapter(directory / f"a{number}", MODEL, seed=number, rank=4 + 3 * number)
    write_adapter(directory / "large", MODEL, rank=17)
    return directory


@pytest.fixture(scope="module")
def engine(files: Path) -> Iterator[EngineProcess]:
    modules = [f"a0={files / 'a0'}", f'{{"name": "a1", "path": "{files / "a1"}", "base_model_name": "base"}}']
    with EngineProcess(MODEL, *OPTIONS, "--enable-lora", "--max-loras", "7", "--lora-modules", *modules) as running:
        for name in ("a2", "a3"):
            assert load(running, name, files / name).status_code == 200
        yield running


def of_model(body: Body, name: str) -> Body:
    return {**body, "model": name}


@pytest.fixture(scope="module")
def truth(engine: EngineProcess) -> dict[str, list[Answer]]:
    """Answers of each model, one body after another."""
    return {name: answers(engine, [of_model(body, name) for body in BODIES], concurrency=1) for name in NAMES}


def order(engine: EngineProcess, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{engine.url}/v1/{route}", json=body, timeout=WATCHDOG_S, headers=OPERATOR)


def load(engine: EngineProcess, name: str, path: Path, **body: Any) -> httpx.Response:
    return order(engine, "load_lora_adapter", lora_name=name, lora_path=str(path), **body)


def unload(engine: EngineProcess, name: str) -> httpx.Response:
    return order(engine, "unload_lora_adapter", lora_name=name)


def models(engine: EngineProcess) -> dict[str, Any]:
    return {card["id"]: card for card in httpx.get(f"{engine.url}/v1/models", timeout=WATCHDOG_S).json()["data"]}


def test_a_model_is_an_adapter_in_every_api(engine: EngineProcess, files: Path) -> None:
    cards = models(engine)
    assert tuple(cards) == NAMES
    assert (cards["a2"]["root"], cards["a2"]["parent"], cards["base"]["parent"]) == (str(files / "a2"), "base", None)
    client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-")
    messages: Any = [{"role": "user", "content": "hello there"}]
    chats = [client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=12) for name in NAMES]
    assert [chat.model for chat in chats] == list(NAMES)
    texts = [chat.choices[0].message.content for chat in chats]
    assert len(set(texts)) == len(NAMES)
    with httpx.Client(base_url=engine.url, timeout=WATCHDOG_S) as plain:
        for name, text in zip(NAMES, texts, strict=True):
            body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 12}
            claude = plain.post("/v1/messages", json=body).json()
            assert (claude["model"], claude["content"][0]["text"]) == (name, text)
            body = {"model": name, "input": "hello there", "temperature": 0, "max_output_tokens": 12}
            answer = plain.post("/v1/responses", json=body).json()
            assert (answer["model"], answer["output"][-1]["content"][0]["text"]) == (name, text)
        tags = [model["model"] for model in plain.get("/api/tags").json()["models"]]
        assert tags == [f"{name}:latest" for name in NAMES]
        for tag, text in zip(tags, texts, strict=True):
            body = {"model": tag, "messages": messages, "options": {"temperature": 0, "num_predict": 12}, "stream": False}
            line = plain.post("/api/chat", json=body).json()
            assert (line["model"], line["message"]["content"]) == (tag, text)
        missing = plain.post("/v1/completions", json={"model": "a9", "prompt": "x"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert "available: base, a0, a1, a2, a3" in missing.text


def test_each_is_as_alone(engine: EngineProcess, truth: dict[str, list[Answer]]) -> None:
    """All run at once, 16 at a time; the base model answers as in an engine without adapters."""
    keys = [(number, name) for number in range(len(BODIES)) for name in NAMES]
    found = answers(engine, [of_model(BODIES[number], name) for number, name in keys], concurrency=16)
    for (number, name), answer in zip(keys, found, strict=True):
        assert answer == truth[name][number], (number, name)
    assert all(len({str(truth[name][number]) for name in NAMES}) == len(NAMES) for number in range(0, len(BODIES), 3))
    with EngineProcess(MODEL, *OPTIONS) as plain:
        assert answers(plain, BODIES) == truth["base"]
        refused = load(plain, "a0", Path("/nowhere"))
        assert (refused.status_code, "start the engine with --enable-lora" in refused.text) == (400, True)


def test_top_shows_them(engine: EngineProcess, truth: dict[str, list[Answer]]) -> None:
    """Name, rank, sequences and load time are on the screen, in the JSON, and for the page."""
    command = [sys.executable, "-m", "tools.cli", "top", "--run-dir", str(engine.run.directory), "--interval", "0.1"]
    shown = {
        how: subprocess.run([*command, how], cwd=REPOSITORY, capture_output=True, text=True) for how in ("--json", "--once")
    }
    found = json.loads(shown["--json"].stdout)["adapters"]
    assert [(each["name"], each["rank"], each["is_leaving"]) for each in found] == [
        (f"a{number}", 4 + 3 * number, False) for number in range(4)
    ]
    assert all(each["num_running"] == each["num_waiting"] == 0 and each["loaded_at"] > 1e9 for each in found)
    assert all(f"a{number} rank {4 + 3 * number}  0 running" in shown["--once"].stdout for number in range(4))
    assert httpx.get(f"{engine.url}/dashboard", timeout=WATCHDOG_S, headers=OPERATOR).json()["adapters"] == found


def test_adapters_share_no_cached_prefixes(engine: EngineProcess, files: Path) -> None:
    prompt = [(7 * index) % 900 + 3 for index in range(80)]

    def num_cached(name: str) -> int:
        body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    for name in NAMES:
        assert (num_cached(name), num_cached(name)) == (0, 64)
    assert load(engine, "again", files / "a1").status_code == 200
    assert num_cached("again") == 64, "the same contents under another name"
    assert unload(engine, "again").status_code == 200


def test_unloading_waits_for_its_requests(engine: EngineProcess, files: Path) -> None:
    """Meanwhile no request can begin with the adapter, but a new adapter may take its name."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=engine.url, timeout=httpx.Timeout(WATCHDOG_S)) as client:
            alone = await stream_one(client, of_model(LONG, "a3"))
            async with held(engine):  # it cannot end before all of this is asked
                stream = asyncio.create_task(stream_one(client, of_model(LONG, "a3")))
                await asyncio.to_thread(wait_for_waiting, engine, 1)
                leaving = asyncio.create_task(asyncio.to_thread(unload, engine, "a3"))
                await asyncio.to_thread(wait_until, lambda: "a3" not in models(engine), what="a3 is leaving")
                assert not leaving.done()
                refused = await client.post("/v1/completions", json={"model": "a3", "prompt": "x"})
                assert refused.status_code == 404
                assert (await asyncio.to_thread(unload, engine, "a3")).status_code == 409
                assert not leaving.done()
            assert (await asyncio.to_thread(load, engine, "a3", files / "a4")).status_code == 200
            other = await stream_one(client, of_model({**LONG, "max_tokens": 20}, "a3"))
            assert await stream == alone
            assert (await leaving).status_code == 200
            assert other.token_ids != alone.token_ids[:20]
            back = await asyncio.to_thread(load, engine, "a3", files / "a3", load_inplace=True)
            assert back.status_code == 200
            assert await stream_one(client, of_model(LONG, "a3")) == alone

    asyncio.run(run())


@pytest.mark.parametrize(
    ("route", "body", "status", "cause"),
    [
        ("load_lora_adapter", {"lora_name": "a0", "lora_path": "{files}/a4"}, 400, "already loaded"),
        ("load_lora_adapter", {"lora_name": "base", "lora_path": "{files}/a4"}, 400, "is already a name of the model"),
        ("load_lora_adapter", {"lora_name": "b", "lora_path": "{files}/large"}, 400, "start with --max-lora-rank 17"),
        ("load_lora_adapter", {"lora_name": "b", "lora_path": "{files}/nowhere"}, 400, "is not a directory"),
        ("load_lora_adapter", {"lora_name": "b", "lora_path": "a4"}, 400, "expected an absolute directory path"),
        ("load_lora_adapter", {"lora_name": "b", "lora_path": "/x\0"}, 400, "lora_path"),
        ("load_lora_adapter", {"lora_name": "b c", "lora_path": "/x"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "b"}, 400, "lora_path"),
        ("load_lora_adapter", {}, 400, "lora_name"),
        ("unload_lora_adapter", {"lora_name": "b"}, 404, "is not loaded"),
        ("unload_lora_adapter", {"lora_name": "base"}, 404, "is not loaded"),
        ("unload_lora_adapter", {"lora_name": "b", "lora_int_id": "x"}, 400, "lora_int_id"),
    ],
)
def test_invalid_commands_are_refused(
    route: str, body: dict[str, str], status: int, cause: str, engine: EngineProcess, files: Path
) -> None:
    given = {name: value.replace("{files}", str(files)) for name, value in body.items()}
    answer = order(engine, route, **given)
    assert (answer.status_code, cause in answer.text) == (status, True), answer.text
    without_key = httpx.post(f"{engine.url}/v1/{route}", json=given, timeout=WATCHDOG_S)
    assert without_key.status_code == 401
    assert tuple(models(engine)) == NAMES


def test_adapter_slots_are_limited(engine: EngineProcess, files: Path) -> None:
    for name in ("b4", "b5", "b6"):
        assert load(engine, name, files / "a4").status_code == 200
    full = load(engine, "b7", files / "a4")
    assert (full.status_code, "all 7 adapter slots are in use" in full.text) == (400, True)
    for name in ("b4", "b5", "b6"):
        assert unload(engine, name).status_code == 200
    assert load(engine, "b7", files / "a4").status_code == 200
    assert unload(engine, "b7").status_code == 200


def test_refused_prompts_release_their_adapter(engine: EngineProcess, files: Path) -> None:
    """A prompt that the tokenizer refuses leaves no open request, alone or among others of its request."""
    assert load(engine, "left", files / "a4").status_code == 200
    for prompt in ("hello " * 4000, ["hello", "hello " * 4000], [5] * 1300):
        answer = httpx.post(f"{engine.url}/v1/completions", json={"model": "left", "prompt": prompt}, timeout=WATCHDOG_S)
        assert answer.status_code == 400, answer.text
    assert engine.metric("adapter_open_requests") == 0
    assert unload(engine, "left").status_code == 200


def test_adapters_change_while_processes_die(
    engine: EngineProcess, files: Path, truth: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Every stream has the bytes of its adapter. Restarted processes serve loaded adapters even if their files are gone;
    commands are carried out completely or not at all."""
    moving = tmp_path / "moving"
    shutil.copytree(files / "a4", moving)
    assert load(engine, "moving", moving).status_code == 200
    of_moving = answers(engine, [of_model(body, "moving") for body in BODIES], concurrency=1)
    shutil.rmtree(moving)
    names = (*NAMES, "moving")
    keys = [(number, names[index % len(names)]) for index in range(12) for number in range(len(BODIES))]

    async def orders() -> None:
        for victims in (("worker0",), ("scheduler",), ("tokenizer0",), ("cache",), ("scheduler", "worker0")):
            loading = asyncio.create_task(asyncio.to_thread(load, engine, "passing", files / "a4"))
            epochs = {victim: await asyncio.to_thread(engine.kill, victim) for victim in victims}
            status = (await loading).status_code
            assert status in (200, 503)
            for victim, epoch in epochs.items():
                await asyncio.to_thread(engine.wait_for_restart, victim, epoch)
            assert ("passing" in models(engine)) == (status == 200)
            if status == 503:
                assert (await asyncio.to_thread(load, engine, "passing", files / "a4")).status_code == 200
            assert (await asyncio.to_thread(load, engine, "passing", files / "a3", load_inplace=True)).status_code == 200
            assert (await asyncio.to_thread(unload, engine, "passing")).status_code == 200

    async def run() -> list[Answer]:
        ordering = asyncio.create_task(orders())
        found: list[Answer] = []
        while not ordering.done():
            found += await stream_all(engine.url, [of_model(BODIES[number], name) for number, name in keys], 16)
        await ordering
        return found

    for index, answer in enumerate(asyncio.run(run())):
        number, name = keys[index % len(keys)]
        assert answer == (of_moving if name == "moving" else truth[name])[number], (number, name)
    assert unload(engine, "moving").status_code == 200
    assert engine.metric("num_adapters") == 4
    engine.wait_until_idle()


def test_the_http_process_dies(engine: EngineProcess, files: Path, truth: dict[str, list[Answer]]) -> None:
    """Open streams die with it, and their adapter can be unloaded."""
    assert load(engine, "left", files / "a4").status_code == 200

    async def cut_streams() -> list[object]:
        begun = asyncio.Event()
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=engine.url, timeout=WATCHDOG_S, limits=limits) as client:
            streams = [asyncio.create_task(stream_one(client, of_model(LONG, "left"), begun.set)) for _ in range(8)]
            await asyncio.wait_for(begun.wait(), WATCHDOG_S)
            epoch = await asyncio.to_thread(engine.kill, "api0")
            results = await asyncio.gather(*streams, return_exceptions=True)
            await asyncio.to_thread(engine.wait_for_restart, "api0", epoch)
            return [result for result in results if isinstance(result, httpx.TransportError)]

    for _ in range(10):  # again where all had ended before the kill, so that none was left to be cut
        if cut := asyncio.run(cut_streams()):
            break
    assert cut
    engine.wait_until_idle()
    assert tuple(models(engine)) == (*NAMES, "left")
    assert unload(engine, "left").status_code == 200
    assert answers(engine, [of_model(BODIES[0], "a2")]) == truth["a2"][:1]


def test_invalid_adapter_ends_the_start(files: Path) -> None:
    engine = EngineProcess(MODEL, *OPTIONS, "--enable-lora", "--lora-modules", f"b={files / 'large'}")
    try:
        engine.launch()
        assert engine.wait_for_exit() == 2
        assert "the engine cannot start: --lora-modules b: " in engine.text
        assert "start with --max-lora-rank 17" in engine.text
    finally:
        engine.close()
