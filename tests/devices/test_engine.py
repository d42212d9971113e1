"""Engines on the device over HTTP have the answers of the CPU place byte for byte, across chunks, caching, preemption, kills,
and stops, where no card's memory is kept for the next worker; across reloads in `tests/tools/test_device_whole.py`. Layers that
draft are in `test_steps.py`, across kills on the CPU in `tests/e2e/test_layers_that_draft.py`.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import OptionError
from engine.installation import CUDA_DRIVER
from engine.options.resolve_device import installed_paddle, resolve_device
from tests.devices import engines
from tests.devices.board import Board
from tests.devices.build import NAME, environment
from tests.devices.child import Child
from tests.devices.engines import BODIES, CAPTURED, CUT, DRAFTS, Expected, beside_a_kill, said
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.test_chaos import VICTIMS, Deltas, kill_in_turn, wait_for_503
from tests.e2e.workload import Answer, answers, answers_together, stream_all
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.pictures import picture

MODEL = GOLDEN / "qwen3"
OPTIONS = ("--ops", "reference", *engines.OPTIONS)
HANG = re.compile(r"worker0 hangs in step [1-9]\d*: no heartbeat for 6 s")
OF_DEVICES = ("device_copies_total", "device_wait_seconds_total", "captured_step_rows_count", "eager_step_rows_count")
KILLS = (("tokenizer0", "cache"), ("scheduler",), ("worker0",))


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return Board(tmp_path_factory.mktemp("board") / "board")


def engine_without(call: str, plugin: Path, board: Board, driver: str, *options: str) -> EngineProcess:
    """Return an engine with a driver that does not support `call`, without which memory cannot be shared."""
    variables = environment(plugin, board, LIBCUDA_FAILS=call)
    engine = EngineProcess(MODEL, "--device", NAME, *OPTIONS, *options, environment=variables)
    engine.command[1:4] = ["-m", "tests.devices.serve_with_driver", driver]
    return engine


@pytest.fixture(scope="module")
def engine(plugin: Path, board: Board, driver: str) -> Iterator[EngineProcess]:
    options = (*DRAFTS, *CUT, *CAPTURED, "--hang-timeout", "6")
    board.set(delay_seed=11)
    with engine_without("cuMemExportToShareableHandle", plugin, board, driver, *options) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plugin: Path, board: Board) -> Expected:
    """Tokens and log-probabilities on the CPU place, op by op, each request alone, without drafts."""
    with Child(plugin, board) as child:
        found: Expected = child.call("answers_to", BODIES, {"max_model_len": 300})
    return found


def test_answers_equal_those_of_the_cpu(engine: EngineProcess, expected: Expected, board: Board) -> None:
    """Requests in chunks, with drafts, in less memory than they need together; and again with a warm prefix cache."""
    assert said(answers_together(engine, BODIES)) == expected
    assert said(answers(engine, BODIES[::-1], concurrency=3)[::-1]) == expected
    assert board.counts()["replays"] > 10
    for name in ("num_preemptions_total", "prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total", *OF_DEVICES):
        assert engine.metric(name) > 0, name
    assert (engine.metric("captured_step_sizes"), engine.metric("uncaptured_step_sizes")) == (4, 0)


def test_unshared_cache_is_noted_once(engine: EngineProcess) -> None:
    (note,) = [line for line in engine.output if "the driver cannot share memory" in line]
    assert note.startswith("note: KV cache of GPU 0 ends with its worker: ")
    assert "(cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED)" in note
    assert "the cache ends with the worker" in engine.text


def test_streams_survive_every_kill(engine: EngineProcess, expected: Expected) -> None:
    """The cache ends with the worker: all running sequences are computed again."""

    async def disturbed_run() -> None:
        deltas = Deltas(seed=77)
        killer = asyncio.create_task(kill_in_turn(engine, deltas, KILLS))
        while not killer.done():
            assert said(await stream_all(engine.url, BODIES, 8, deltas.note)) == expected
        await killer

    before = engine.actors()
    asyncio.run(disturbed_run())
    after = engine.actors()
    assert (
        {name for name in after if after[name]["epoch"] != before[name]["epoch"]}
        == set(VICTIMS)
        == {name for together in KILLS for name in together}
    )
    engine.wait_until_idle()


def test_stopped_stream_is_reported_as_a_hang(engine: EngineProcess, expected: Expected, board: Board) -> None:
    async def run_and_stop() -> list[Answer]:
        flowing = asyncio.Event()
        streams = asyncio.create_task(stream_all(engine.url, BODIES, 8, flowing.set))
        await asyncio.wait_for(flowing.wait(), timeout=WATCHDOG_S)
        board.set(is_stopped=1)
        more = asyncio.create_task(stream_all(engine.url, BODIES, 8))  # the others had ended there before
        try:
            await asyncio.to_thread(wait_for_503, engine, "worker0")
            await asyncio.to_thread(wait_until, lambda: HANG.search(engine.text), what="rank and step are told")
        finally:
            board.set(is_stopped=0)
        return await streams + await more

    assert said(asyncio.run(run_and_stop())) == expected * 2


def test_next_step_starts_before_tokens_are_known(plugin: Path, board: Board, driver: str, engine: EngineProcess) -> None:
    """A step without drafts begins before the tokens that it reads are known to the host; a worker that dies between them
    changes nothing. Tokens that the host samples are waited for."""
    plain = [{"prompt": body["prompt"], "max_tokens": 16, "ignore_eos": True, "temperature": 0} for body in BODIES]
    bodies = [{**body, "return_token_ids": True} for body in (*plain, BODIES[1])]
    with engine_without("cuMemCreate", plugin, board, driver, *CUT, "--plan", "eager") as alone:
        disturbed = beside_a_kill(alone, bodies, 8, "worker0", restarted=("worker0",))
        found = answers_together(alone, bodies), asyncio.run(disturbed)
    expected = said(answers(engine, bodies))
    assert [len(token_ids) for token_ids, _ in expected] == [*[16] * len(plain), 24]
    assert [said(each) for each in found] == [expected] * 2


def test_encoder_arena_survives_a_device_worker(plugin: Path, board: Board) -> None:
    """The prefix cache dies with the worker; the picture in it is not encoded again."""
    body = {"prompt": [40, 3, 5, 4, *range(50, 90)], "max_tokens": 8, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    link = f"data:image/png;base64,{base64.b64encode(picture(56, 56, 99)).decode()}"
    bodies = [{**body, "return_token_ids": True, "multi_modal_data": {"image": [link]}}]
    with EngineProcess(GOLDEN / "qwen2_5_vl", "--device", NAME, *OPTIONS, environment=environment(plugin, board)) as seeing:
        first, again = said(answers(seeing, bodies)), said(answers(seeing, bodies))
        num_hits = seeing.metric("prefix_cache_hits_total")
        seeing.wait_for_restart("worker0", seeing.kill("worker0"))
        assert [again, said(answers(seeing, bodies))] == [first] * 2
        assert seeing.metric("prefix_cache_hits_total") == num_hits > 0
        assert seeing.metric("encoder_units_total") == 1


def test_driver_and_plugin_are_asked_before_a_start(tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, which ends, says what cards there are, and why a plugin cannot be loaded."""
    (tmp_path / f"lib{NAME}.so").write_text("no library")
    (tmp_path / CUDA_DRIVER).symlink_to(driver)
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("LIBCUDA_CAPABILITY", "7.5")
    found = installed_paddle()
    assert (found.gpus, found.memory) == ((("no card at all", (7, 5)),) * 2, {"gpu": 1 << 30})
    library = f"{tmp_path}/lib{NAME}.so"
    says = rf"--device {NAME} needs Paddle, .* Fail to open library: {library}.*; install the plugin of the custom device"
    with pytest.raises(OptionError, match=says):
        resolve_device(NAME, "reference", 1, lambda: found)
