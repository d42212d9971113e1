"""`tokamak run-batch` against a real server of another kind: answers in order, each line once, with slow, full and killed
servers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.paths import REPOSITORY
from tests.tools.openai_server import API_KEY, Behaviour, OpenAIServer, openai_server
from tests.waiting import WATCHDOG_S, wait_until

COMPLETIONS = "/v1/completions"
TOKAMAK = REPOSITORY / "tools" / "package" / "tokamak" / "__main__.py"
CONCURRENCY = 8


def request(number: int, **fields: Any) -> str:
    body = {"prompt": f"p{number}", **fields}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": COMPLETIONS, "body": body})


def write(directory: Path, *lines: str) -> Path:
    path = directory / "in.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    files = ("-i", "in.jsonl", "-o", "out.jsonl")
    command = [sys.executable, str(TOKAMAK), "run-batch", *files, *options]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(directory: Path, *options: str) -> tuple[int, str]:
    process = start(directory, *options)
    _, said = process.communicate(timeout=WATCHDOG_S)
    return process.returncode, said


def of(server: OpenAIServer) -> tuple[str, ...]:
    return "--url", server.url, "--concurrency", str(CONCURRENCY)


def asked(server: OpenAIServer) -> Counter[str]:
    return Counter(body["prompt"] for body in server.bodies(COMPLETIONS))


def answers(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]


def test_answers_are_in_order_with_errors_as_lines(tmp_path: Path) -> None:
    """A server that is full from time to time is retried."""
    lines = [request(number) for number in range(60)]
    lines[10], lines[20] = "{nonsense", request(20, stream=True)
    write(tmp_path, *lines)
    with openai_server(Behaviour(refuse_every=7, needs_key=True)) as server:
        code, said = run(tmp_path, *of(server), "--api-key", API_KEY)
        assert (code, said) == (0, "answered 60 lines, 2 of them with errors: out.jsonl\n")
        assert run(tmp_path, *of(server), "--api-key", API_KEY) == (code, said)
    found = answers(tmp_path)
    assert [each["custom_id"] for each in found] == [f"r{number}" if number != 10 else None for number in range(60)]
    assert [number for number, each in enumerate(found) if each["error"]] == [10, 20]
    assert {each["response"]["status_code"] for each in found if each["response"]} == {200}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_refusals_of_the_server_become_answers(tmp_path: Path) -> None:
    write(tmp_path, request(0), request(1))
    with openai_server(Behaviour(status=400)) as server:
        assert run(tmp_path, "--url", f"{server.url}/v1")[0] == 0
    assert [each["response"]["status_code"] for each in answers(tmp_path)] == [400, 400]


def test_refused_key_ends_the_run(tmp_path: Path) -> None:
    """The run ends; otherwise each line would get that error as its answer."""
    write(tmp_path, *(request(number) for number in range(30)))
    with openai_server(Behaviour(needs_key=True)) as server:
        code, said = run(tmp_path, *of(server))
        assert (code, "401: wrong key; 0 lines are answered" in said) == (1, True), said
        assert run(tmp_path, *of(server), "--api-key", API_KEY)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_run_is_continued(tmp_path: Path, number: signal.Signals) -> None:
    """Several times. Answered lines are never sent again, although an early line that hangs holds back all behind it; a
    truncated line is cut off."""
    out = tmp_path / "out.jsonl"
    write(tmp_path, *(request(number) for number in range(1000)))
    answered: dict[str, int] = {}  # prompt -> how often it had been asked then
    with openai_server(Behaviour(hang_on=("p3", "p400"))) as server:
        for wanted in (150, 600):
            process = start(tmp_path, *of(server))
            wait_until(lambda wanted=wanted: len(asked(server)) >= wanted, what="it is under way")
            process.send_signal(number)
            process.communicate(timeout=WATCHDOG_S)
            assert process.returncode == (130 if number is signal.SIGINT else -number)
            kept = out.read_text() + (tmp_path / "out.jsonl.part").read_text()
            prompts = {f"p{json.loads(line)['custom_id'][1:]}" for line in kept.splitlines() if line.endswith("}")}
            answered = {prompt: asked(server)[prompt] for prompt in prompts} | answered
            assert len(answered) >= wanted - CONCURRENCY
            with open(out, "a") as torn:
                torn.write('{"id":"batch_req_')
            server.behaviour.hang_on = server.behaviour.hang_on[1:]
        assert run(tmp_path, *of(server))[0] == 0
        counts = asked(server)
        assert {prompt: counts[prompt] for prompt in answered} == answered
        assert len(counts) == 1000
        assert counts.total() <= 1000 + 2 * CONCURRENCY  # what was under way
    assert [each["custom_id"] for each in answers(tmp_path)] == [f"r{number}" for number in range(1000)]
    assert not (tmp_path / "out.jsonl.part").exists()


@pytest.mark.slow
def test_waiting_answers_keep_no_bodies(tmp_path: Path) -> None:
    """200 answers wait behind the first; their requests had 200 MiB."""
    body, count = "x" * (1 << 20), 200
    with open(tmp_path / "in.jsonl", "w") as lines:
        for number in range(count):
            lines.write(f"{request(number, suffix=body if number else '')}\n")
    with openai_server(Behaviour(hang_on=("p0",))) as server:
        process = start(tmp_path, *of(server))
        wait_until(lambda: len(asked(server)) == count, what="all but the first are answered")
        wait_until(lambda: (tmp_path / "out.jsonl.part").read_text().count("\n") == count - 1, what="they are kept beside")
        status = Path(f"/proc/{process.pid}/status").read_text()
        server.behaviour.hang_on = ()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WATCHDOG_S)
    resident_kib = int(re.findall(r"VmRSS:\s*(\d+) kB", status)[0])
    assert resident_kib < 128 << 10


def test_run_continues_with_another_server(tmp_path: Path) -> None:
    """The server never comes back: answers stay, and the next server gets the rest."""
    write(tmp_path, *(request(number) for number in range(50)))
    process = None
    with openai_server(Behaviour(hang_on=("p30",))) as server:
        process = start(tmp_path, *of(server))
        wait_until(lambda: len(asked(server)) == 50, what="all but one are asked")
        server.behaviour.hang_on = ()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WATCHDOG_S)
    assert said == "interrupted; 30 lines are answered, run the same command again to continue\n"
    with openai_server() as other:
        assert run(tmp_path, *of(other))[0] == 0
        assert "p30" in asked(other)
        assert len(asked(other)) <= CONCURRENCY
    assert len(answers(tmp_path)) == 50


def rest_is_gone(source: Path) -> None:
    os.truncate(source, 1000)


def rest_is_another(source: Path) -> None:
    source.write_text(source.read_text().replace('"n": 1', '"n": 2'))


def more_comes(source: Path) -> None:
    with open(source, "a") as file:
        file.write(f"{request(0)}\n")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (rest_is_gone, (1, "in.jsonl changed while it was read: request ")),
        (rest_is_another, (1, " is different; ")),
        (more_comes, (0, "answered 1500 lines, 0 of them with errors")),
    ],
)
def test_input_changes_during_a_run(tmp_path: Path, change: Callable[[Path], None], expected: tuple[int, str]) -> None:
    """Requests that were not there at the check are not sent, and the last line says so. Lines added at the end belong to
    another run."""
    source = write(tmp_path, *(request(number, suffix="x" * 500, n=1) for number in range(1500)))
    with openai_server() as server:
        process = start(tmp_path, "--url", server.url, "--concurrency", "1")
        wait_until(lambda: asked(server), what="it is under way")
        change(source)
        _, said = process.communicate(timeout=WATCHDOG_S)
        assert (process.returncode, expected[1] in said) == (expected[0], True), said
        assert {body["n"] for body in server.bodies(COMPLETIONS)} == {1}
    found = answers(tmp_path)
    assert len(found) == 1500 if expected[0] == 0 else 0 < len(found) < 1500
    assert not any(each["error"] for each in found)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_output_does_not_stop_a_run(tmp_path: Path, closed: str) -> None:
    write(tmp_path, *(request(number) for number in range(9)))
    with openai_server() as server:
        command = f"exec {sys.executable} {TOKAMAK} run-batch -i in.jsonl -o out.jsonl --url {server.url} {closed}"
        assert subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=WATCHDOG_S, check=False).returncode == 0
    assert [each["custom_id"] for each in answers(tmp_path)] == [f"r{number}" for number in range(9)]


WRONG: list[tuple[list[str], list[str], str]] = [
    ([request(1), "", request(1)], [], "lines 1 and 3 have the same custom_id 'r1'"),
    ([request(1)], ["--url", "http://localhost:1", "--max-num-seqs", "3"], "--max-num-seqs"),
    ([request(1)], ["--url", "nowhere"], "expected a URL such as"),
    ([request(1)], ["--api-key", "x"], "--api-key"),
    ([request(1)], ["--url", "http://localhost:1", "--api-key", "x\n"], "--api-key"),
    ([request(1)], ["--url", "http://localhost:1", "--api-key", "\u043a"], "--api-key"),
    ([request(1)], ["--concurrency", "0"], "1 to 256"),
    ([request(1)], ["-o", "in.jsonl"], "is the input file"),
    ([request(1)], ["-o", "/dev/null"], "not a regular file"),
    ([request(1)], ["-i", "none.jsonl"], "file not found"),
    ([request(1)], ["-i", "."], "not a regular file"),
    ([request(1)], ["--max-num-seqz", "3"], "--max-num-seqz"),
    ([request(1)], ["--model", "no/such/directory/here"], "no/such/directory/here"),
]


@pytest.mark.parametrize(("lines", "options", "what"), WRONG)
def test_mistakes(tmp_path: Path, lines: list[str], options: list[str], what: str) -> None:
    source = write(tmp_path, *lines)
    code, said = run(tmp_path, *options)
    assert code == 2, said
    assert what in said
    assert source.read_text() == "".join(f"{line}\n" for line in lines)
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_text()


def test_empty_input(tmp_path: Path) -> None:
    write(tmp_path)
    assert run(tmp_path) == (0, "answered 0 lines, 0 of them with errors: out.jsonl\n")
