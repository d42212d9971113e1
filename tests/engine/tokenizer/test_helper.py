"""Helper processes and their lanes: limits, turns, and all ways to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.messages import (
    AnswerFormat,
    ChatPrompt,
    Detokenized,
    Submit,
    TextPrompt,
    Tokenize,
    decode,
    encode,
)
from engine.tokenizer.helper import Helper, HelperEnded
from engine.tokenizer.lanes import HEAVY_BYTES, HUGE_BYTES, MAX_CALLS, MAX_HEAVY_JOBS, Job, Lanes
from engine.tokenizer.preparation import Answer, Refusal, _encoder
from tests.paths import REPOSITORY
from tests.requests import submit_of
from tests.waiting import wait_until

USER = b'[{"role": "user", "content": "x"}]'


def work(record: bytes) -> bytes:
    """Return the text of a call; "wait:FIFO" waits until the file has been opened for writing."""
    message = decode(record)
    assert isinstance(message, Tokenize | Submit)
    prompt = message.prompts[0] if isinstance(message, Submit) else message.prompt
    text = prompt.text if isinstance(prompt, TextPrompt) else "chat"
    if text.startswith("wait:"):
        Path(text[5:].strip()).read_bytes()
    elif text == "die":
        os._exit(7)
    elif text == "spin":
        while True:
            pass
    elif text == "memory":
        text = str(len(bytearray(64 << 30)))
    key = message.shared.key if isinstance(message, Submit) else message.call_id
    return _encoder.encode(Detokenized(key, f"{text} by {os.getpid()}"))


def call(call_id: str, text: str = "", chat_template: str = "", source: str = "") -> Job:
    prompt = ChatPrompt(USER, chat_template=chat_template) if chat_template else TextPrompt(text or call_id)
    message = Tokenize(call_id, "api0", prompt, source=source)
    return Job(message, encode(message))


def form(request_id: str, source: str, text: str = "") -> Job:
    return prompt(request_id, source, text or request_id, format=AnswerFormat("json", "{}", "response_format"))


def prompt(request_id: str, source: str, text: str, **options: Any) -> Job:
    submit = submit_of(text, request_id, source=source, **options)
    return Job(submit, encode(submit), {request_id: submit.sequences[0]})


class Bench(Lanes):
    def __init__(self) -> None:
        super().__init__(work, 2, lambda name: name == "own")
        self.answers: dict[str, Answer] = {}

    def ask(self, *jobs: Job) -> None:
        for job in jobs:
            self.add(job, is_new_request=True)

    def answer(self, call_id: str) -> Answer:
        return wait_until(lambda: (self.look(), self.answers.get(call_id))[1], what=call_id)

    def look(self) -> None:
        self.answers.update({job.key: answer for job, answer in self.finished()})

    def text(self, call_id: str) -> str:
        answer = self.answer(call_id)
        assert isinstance(answer, Detokenized), answer
        return answer.text.partition(" by ")[0]

    def refusal(self, call_id: str) -> Refusal:
        answer = self.answer(call_id)
        assert isinstance(answer, Refusal)
        return answer


@pytest.fixture
def lanes() -> Iterator[Bench]:
    lanes = Bench()
    yield lanes
    pids = [helper.pid for helper in lanes.helpers]
    lanes.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """An empty FIFO that cannot be read to its end until the test ends."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    yield path
    os.close(descriptor)


def test_a_helper_is_used_again(lanes: Bench) -> None:
    for index in range(3):
        lanes.ask(call(f"c{index}"))
        assert lanes.text(f"c{index}") == f"c{index}"
    assert len(lanes.helpers) == 1
    assert lanes.deadline_ns == 0


def test_slow_jobs_delay_only_their_lane(lanes: Bench, gate: Path) -> None:
    """A template in a request and a long text each wait in a lane of their own; the model's own template in another."""
    waiting = [call(f"slow{index}", f"wait:{gate}" + " " * 40_000) for index in range(2)]
    lanes.ask(*waiting, call("foreign", chat_template="{{ 1 }}"))
    lanes.ask(call("quick"), call("own", chat_template="own"))
    assert lanes.text("quick") == "quick"
    assert lanes.text("own") == "chat"
    assert lanes.answers.keys() == {"quick", "own"}
    assert lanes.num_waiting == 1
    assert lanes.deadline_ns > 0
    lanes.cancel(waiting[0])
    wait_until(lambda: (lanes.look(), "foreign" in lanes.answers or lanes.cancel(waiting[0]))[1], what="room")


def test_slow_formats_of_one_source_block_no_other(lanes: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source may send any number of slow formats, and so may others."""
    monkeypatch.setattr("engine.tokenizer.lanes.FIRST_FORMAT_NS", 100_000_000)
    flood = [form(f"slow{index}", "flood", "spin") for index in range(9)]
    for job in (*flood, form("small", "other")):
        lanes.add(job, is_new_request=False)
    assert lanes.text("small") == "small"
    refused = {key for key, answer in lanes.answers.items() if isinstance(answer, Refusal) and answer.status == 429}
    assert lanes.answers.keys() == {"small", *refused}  # more than can wait among the slow ones
    for job in flood:
        lanes.cancel(job)
    lanes.ask(form("again", "flood"))
    assert lanes.text("again") == "again"
    assert lanes.num_waiting == 0
    wait_until(lambda: (lanes.look(), not lanes.deadline_ns)[1], what="the end of what nobody wants")


def test_a_source_has_half_of_the_queue(lanes: Bench, gate: Path) -> None:
    lanes.ask(*(form(f"a{index}", "a", f"wait:{gate}") for index in range(3)))  # two have helpers
    with pytest.raises(
        RequestError, match=r"is full: 1 requests are waiting, 1 of them yours, limit 1 without other users; try again later$"
    ) as caught:
        lanes.ask(form("a3", "a"))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    lanes.ask(form("b", "b"))
    with pytest.raises(RequestError, match="2 requests are waiting"):
        lanes.ask(form("c", "c"))
    assert lanes.num_waiting == 2


@pytest.mark.parametrize(("size", "limit"), [(1, MAX_CALLS), (40_000, MAX_HEAVY_JOBS)])
def test_queues_are_bounded(lanes: Bench, gate: Path, size: int, limit: int) -> None:
    text = f"wait:{gate}" + " " * size
    num_helpers = 1 if size == 1 else 2
    lanes.ask(*(call(f"c{index}", text) for index in range(limit + num_helpers)))
    with pytest.raises(RequestError) as caught:
        lanes.ask(call("one more", text))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    lanes.add(call("again", text), is_new_request=False)  # begun before a crash


def test_busy_source_leaves_room_for_others(lanes: Bench, gate: Path) -> None:
    text = f"wait:{gate}" + " " * 40_000
    lanes.ask(*(prompt(f"m{index}", "many", text) for index in range(2 + MAX_HEAVY_JOBS)))
    with pytest.raises(RequestError, match=f"{MAX_HEAVY_JOBS} of them yours"):
        lanes.ask(prompt("one more", "many", text))
    lanes.ask(prompt("few", "few", text))
    assert lanes.num_waiting == MAX_HEAVY_JOBS + 1


@pytest.mark.slow
def test_calls_of_one_source_leave_room_for_others(lanes: Bench, gate: Path) -> None:
    first = call("first", f"wait:{gate}", source="many")
    lanes.ask(first, *(call(f"m{index}", source="many") for index in range(MAX_CALLS)))
    with pytest.raises(RequestError, match=f"{MAX_CALLS} of them yours"):
        lanes.ask(call("one more", source="many"))
    lanes.ask(call("few", source="few"))
    lanes.cancel(first)
    lanes.answer("few")
    assert list(lanes.answers).index("few") <= 1  # behind one of them
    lanes.answer(f"m{MAX_CALLS - 1}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [("die", "exit code 7"), ("spin", "CPU time"), ("memory", "memory")],
    ids=["die", "spin", "memory"],
)
def test_dead_helper_loses_only_its_job(lanes: Bench, text: str, reason: str) -> None:
    lanes.ask(call("bad", text), call("good"))
    refusal = lanes.refusal("bad")
    assert (refusal.status, refusal.param) == (400, "prompt")
    assert reason in refusal.message
    assert lanes.text("good") == "good"


def test_killed_idle_helper_is_replaced(lanes: Bench, gate: Path) -> None:
    lanes.ask(call("a"))
    lanes.text("a")
    (helper,) = lanes.helpers
    os.kill(helper.pid, signal.SIGKILL)  # while it is idle
    lanes.ask(call("b"))
    assert lanes.text("b") == "b"
    lanes.ask(call("c", f"wait:{gate}"), call("d"))
    os.kill(lanes.helpers[0].pid, signal.SIGKILL)
    assert lanes.text("d") == "d"  # before the other try
    os.kill(lanes.helpers[0].pid, signal.SIGKILL)  # and once more: that is no accident
    assert "signal 9" in lanes.refusal("c").message


def test_however_many_are_killed_while_they_are_idle(lanes: Bench) -> None:
    lanes.ask(form("a", "1"), form("b", "2"))
    assert (lanes.text("a"), lanes.text("b")) == ("a", "b")
    assert len(lanes.helpers) == 2
    for helper in lanes.helpers:
        os.kill(helper.pid, signal.SIGKILL)
        wait_until(lambda pid=helper.pid: has_ended(pid), what="its end")
    lanes.ask(form("c", "1"))
    assert lanes.text("c") == "c"


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch, gate: Path) -> None:
    """The limit holds for a helper that only waits, too."""
    helper = Helper(work)
    monkeypatch.setattr("engine.tokenizer.helper.WALL_SECONDS_PER_CPU_SECOND", 0)
    helper.begin(call("c", f"wait:{gate}").record)
    with pytest.raises(HelperEnded, match="takes more than"):
        wait_until(helper.poll)


def test_helpers_end_with_their_tokenizer() -> None:
    """SIGKILL of the tokenizer, also within a job."""
    source = (
        "from engine.tokenizer.helper import Helper\n"
        "def spin(job):\n"
        "    while True: pass\n"
        "helpers = [Helper(spin), Helper(spin)]\n"
        "helpers[0].begin(b'x'); helpers[0].poll()\n"
        "print(*[helper.pid for helper in helpers], flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    wait_until(lambda: all(has_ended(pid) for pid in pids), what="the helpers' ends")


def has_ended(pid: int) -> bool:
    """Return whether the process has ended; a zombie has, even if its parent has not reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_very_long_texts_delay_only_their_lane(lanes: Bench, gate: Path) -> None:
    lanes.ask(call("a", f"wait:{gate}" + HUGE_BYTES * " "), call("b", f"wait:{gate}" + HUGE_BYTES * " "))
    lanes.ask(call("long", "a prompt" + HEAVY_BYTES * " "))
    assert lanes.text("long").strip() == "a prompt"
    assert set(lanes.answers) == {"long"}
