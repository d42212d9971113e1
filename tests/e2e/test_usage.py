"""Usage of an answer is that of an undisturbed run, whichever process dies before its first token."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.waiting import WATCHDOG_S, wait_until

NUM_CACHED, NUM_PROMPT, NUM_ANSWER = 160, 1500, 3


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """Engine with steps so small that a prompt takes many."""
    with EngineProcess(
        GOLDEN / "qwen3",
        "--max-model-len",
        "1700",
        "--max-num-batched-tokens",
        "1",
        "--max-num-seqs",
        "1",
        "--restart-limit",
        "100",
    ) as running:
        yield running


def complete(engine: EngineProcess, prompt: list[int]) -> Any:
    body = {"prompt": prompt, "max_tokens": NUM_ANSWER, "ignore_eos": True}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


@pytest.mark.parametrize("victim", ["tokenizer0", "scheduler", "worker0"])
def test_usage_after_a_crash(engine: EngineProcess, victim: str) -> None:
    prompt = [1 + (len(victim) * 31 + index * 7 + index // 100) % 1000 for index in range(NUM_PROMPT)]
    complete(engine, prompt[:NUM_CACHED])
    engine.wait_until_idle()
    usages: list[Any] = []
    asking = threading.Thread(target=lambda: usages.append(complete(engine, prompt)))
    asking.start()
    wait_until(lambda: usages or engine.metric("num_requests_running") == 1, what="admitted")
    epoch = engine.kill(victim)
    asking.join(WATCHDOG_S)
    engine.wait_for_restart(victim, epoch)
    (usage,) = usages
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT, NUM_ANSWER)
    assert usage["prompt_tokens_details"] == {"cached_tokens": NUM_CACHED}


def test_usage_when_the_tokenizer_dies_with_the_answer(engine: EngineProcess) -> None:
    """The tokenizer is stopped until the answer has ended at the scheduler; the messages about it are lost with it."""
    prompt = [1 + (index * 11 + index // 90) % 1000 for index in range(NUM_PROMPT)]
    complete(engine, prompt[:NUM_CACHED])
    engine.wait_until_idle()
    httpx.post(f"{engine.url}/admin/pause", json={}, headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
    usages: list[Any] = []
    asking = threading.Thread(target=lambda: usages.append(complete(engine, prompt)))
    asking.start()
    wait_until(lambda: engine.metric("num_requests_waiting") == 1, what="the request waits")
    engine.kill("tokenizer0", signal.SIGSTOP)  # before the scheduler says that it is admitted
    httpx.post(f"{engine.url}/admin/resume", json={}, headers=OPERATOR, timeout=WATCHDOG_S).raise_for_status()
    wait_until(lambda: not (engine.metric("num_requests_waiting") or engine.metric("num_requests_running")), what="it ended")
    epoch = engine.kill("tokenizer0")
    asking.join(WATCHDOG_S)
    engine.wait_for_restart("tokenizer0", epoch)
    (usage,) = usages
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT, NUM_ANSWER)
    assert usage["prompt_tokens_details"] == {"cached_tokens": NUM_CACHED}
