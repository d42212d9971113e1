"""`tokamak trace` on real engines: running, killed, with another trace in progress; Perfetto can read the file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.process.run_directory import Run
from shm.segment import segment_names
from shm.trace import TraceEvent, TraceRing
from tests.e2e.engine_process import DEMO, EngineProcess
from tests.engine.echo_engine import is_gone
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until
from tools.trace.perfetto import OF_REQUESTS, document

BODY = {"prompt": "What is 12 + 345?", "max_tokens": 12, "ignore_eos": True}
WAY = ("api0", "tokenizer0", "scheduler", "worker0", "scheduler", "tokenizer0", "api0")


def goes_its_way(way: list[str]) -> bool:
    """Return whether the request passed the actors in that order; where one is slow, others have the next token already."""
    met = iter(way)
    return all(actor in met for actor in WAY)


def command(run: Run, output: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tools.cli", "trace", "--run", run.run_id, "-o", str(output), *arguments]


def trace(run: Run, output: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(command(run, output, *arguments), cwd=REPOSITORY, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rings(run: Run) -> list[str]:
    return [name for name in segment_names(run.run_id) if ".trace." in name]


class Drawn:
    """A trace file, parsed as Perfetto does: slices by actor, flows by kind."""

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_bytes())["traceEvents"]
        self.actors = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        self.slices = [event for event in events if event["ph"] == "X"]
        self.flows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            if event["ph"] in "stf":
                self.flows[event["cat"], event["id"]].append(event)
        self.lives = [event for event in events if event["ph"] in "be"]

    def names(self, actor: str) -> set[str]:
        return {event["name"] for event in self.slices if self.actors[event["pid"]] == actor}

    def way(self, request: str) -> list[str]:
        """Return the actors that worked on a request in order of time, without repeated neighbours."""
        own = [one for one in self.slices if one["args"].get("request", "").partition("~")[0] == request]
        own.sort(key=lambda one: float(one["ts"]))
        actors = [self.actors[one["pid"]] for one in own]
        return [actor for index, actor in enumerate(actors) if index == 0 or actors[index - 1] != actor]

    def asked_ways(self) -> list[list[str]]:
        """Return the ways of the requests of `ask_until`."""
        ids = {one["args"]["request"].partition("~")[0] for one in self.slices if one["name"] == "submit"}
        return [self.way(request) for request in ids if request.startswith("asked-")]

    def check(self) -> None:
        """Check that slices of a track nest, that each flow begins and ends in order within slices, and that lives end."""
        tracks = defaultdict(list)
        for event in self.slices:
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        for own in tracks.values():
            ends: list[float] = []
            for begin, end in sorted(own, key=lambda span: (span[0], -span[1])):
                while ends and ends[-1] <= begin + 0.002:  # microseconds, as floats
                    ends.pop()
                assert not ends or end <= ends[-1] + 0.002, "slices of a thread overlap"
                ends.append(end)
        for flow in self.flows.values():
            assert "".join(arrow["ph"] for arrow in flow) == f"s{'t' * (len(flow) - 2)}f"
            assert [arrow["ts"] for arrow in flow] == sorted(arrow["ts"] for arrow in flow)
            for arrow in flow:
                assert any(begin <= arrow["ts"] <= end for begin, end in tracks[arrow["pid"], arrow["tid"]])
        open_lives: dict[tuple[str, str], int] = defaultdict(int)
        for life in self.lives:
            open_lives[life["id"], life["name"]] += 1 if life["ph"] == "b" else -1
        assert set(open_lives.values()) <= {0}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(DEMO) as running:
        yield running


def ask_until(engine: EngineProcess, is_over: threading.Event) -> threading.Thread:
    def ask() -> None:
        with httpx.Client(base_url=engine.url, timeout=WATCHDOG_S) as client:
            number = 0
            while not is_over.is_set():
                number += 1
                client.post("/v1/completions", json=BODY, headers={"x-request-id": f"asked-{number}"})

    asking = threading.Thread(target=ask)
    asking.start()
    return asking


def test_a_running_engine(engine: EngineProcess, tmp_path: Path) -> None:
    output, is_over = tmp_path / "trace.json", threading.Event()
    asking = ask_until(engine, is_over)
    try:
        for seconds in ("1.5", "5", "20"):  # longer if no request was complete within it
            said = trace(engine.run, output, "--seconds", seconds)
            drawn = Drawn(output)
            if any(map(goes_its_way, drawn.asked_ways())):
                break
    finally:
        is_over.set()
        asking.join()
    assert str(output) in said
    assert rings(engine.run) == [], "the rings are gone"
    drawn.check()
    assert {"Deltas", "submit", "first token", "last token"} <= drawn.names("api0")
    assert {"prepare", "tokenized", "decode text"} <= drawn.names("tokenizer0")
    assert {"queue", "admit", "schedule", "result"} <= drawn.names("scheduler")
    assert {"step", "forward", "sample", "attention", "linear q+k+v"} <= drawn.names("worker0")
    ways = drawn.asked_ways()
    assert any(map(goes_its_way, ways)), ways
    assert {kind for kind, _ in drawn.flows} == {"request", "step"}
    assert BODY["prompt"] not in output.read_text()


def test_killed_trace_does_not_block_the_next(engine: EngineProcess, tmp_path: Path) -> None:
    """The rings of a killed trace stay until the next one and record no more than was asked for; a concurrent trace is
    refused."""
    running = subprocess.Popen(command(engine.run, tmp_path / "first.json", "--seconds", "600"), cwd=REPOSITORY)
    try:
        wait_until(lambda: len(rings(engine.run)) == 5, what="its rings")
        said = trace(engine.run, tmp_path / "second.json", "--seconds", "0.1", code=1)
        assert f"process {running.pid} is already tracing" in said
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert len(rings(engine.run)) == 5
    trace(engine.run, tmp_path / "third.json", "--seconds", "0.1")
    assert rings(engine.run) == []


def test_an_interrupt_ends_it_early(engine: EngineProcess, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    running = subprocess.Popen(command(engine.run, output, "--seconds", "600"), cwd=REPOSITORY)
    wait_until(lambda: len(rings(engine.run)) == 5, what="its rings")
    wait_until(lambda: _is_reading(engine.run), what="actors that record")
    running.send_signal(signal.SIGINT)
    assert running.wait(WATCHDOG_S) == 0
    assert json.loads(output.read_bytes())["traceEvents"]
    assert rings(engine.run) == []


def _is_reading(run: Run) -> bool:
    ring = TraceRing.attach(run.run_id, "scheduler", is_readonly=True)
    httpx.post(f"http://127.0.0.1:{run.manifest().config.port}/v1/completions", json=BODY, timeout=WATCHDOG_S)
    return ring is not None and bool(ring.take())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seconds", "0"), "expected a number of seconds"),
        (("--seconds", "nan"), "expected a number of seconds"),
        (("--seconds", "1e9"), "expected a number of seconds"),
        (("--seconds", "x"), "invalid"),
    ],
)
def test_bad_options(engine: EngineProcess, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in trace(engine.run, tmp_path / "trace.json", *arguments, code=2)


def test_unwritable_path_is_refused(engine: EngineProcess, tmp_path: Path) -> None:
    """The error comes before the trace, not after it."""
    for place in (tmp_path / "nowhere" / "trace.json", tmp_path, tmp_path / ("x" * 300)):
        assert str(place) in trace(engine.run, place, "--seconds", "600", code=1)
    assert list(tmp_path.iterdir()) == []


def test_trace_of_a_killed_engine(tmp_path: Path) -> None:
    """The last events of the actors of a killed engine can be read as long as its memory exists."""
    engine = EngineProcess(DEMO, "--trace").start()
    try:
        httpx.post(f"{engine.url}/v1/completions", json=BODY, timeout=WATCHDOG_S, headers={"x-request-id": "the-last"})
        pids = [int(row["pid"]) for row in engine.actors().values()]
        run = engine.run
        trace(run, tmp_path / "alive.json", "--seconds", "0.2")  # of one that runs, too
        assert len(rings(run)) == 5, "they are the engine's"
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait_for_exit()
        wait_until(lambda: all(map(is_gone, pids)), what="children gone")
        trace(run, tmp_path / "dead.json")
        drawn = Drawn(tmp_path / "dead.json")
        drawn.check()
        assert goes_its_way(drawn.way("the-last")), drawn.way("the-last")
    finally:
        engine.close()


def test_a_dead_engine_without_a_trace(tmp_path: Path) -> None:
    engine = EngineProcess(DEMO).start()
    try:
        run = engine.run
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait_for_exit()
        kept = tmp_path / "kept.json"
        kept.write_text("mine")
        for place in (tmp_path / "dead.json", kept):
            assert "start engines with --trace" in trace(run, place, code=1)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept.json", "mine")]
    finally:
        engine.close()


@pytest.mark.parametrize("which", [("--run", "ffff"), ("--run-dir", "nowhere"), ("--run-dir", ".")])
def test_refusal_leaves_no_file(tmp_path: Path, which: tuple[str, str]) -> None:
    """An existing file stays unchanged."""
    for name in ("trace.json", "kept.json"):
        (tmp_path / "kept.json").write_text("mine")
        done = subprocess.run(
            [sys.executable, "-m", "tools.cli", "trace", "-o", str(tmp_path / name), *which],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=WATCHDOG_S,
        )
        assert (done.returncode, "tokamak trace: error" in done.stderr) == (1, True), done.stderr
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept.json", "mine")]


def test_several_attempts_are_one_life() -> None:
    """A sequence that was submitted again after a crash has one life and one flow; unknown names are slices."""
    names = ("submit", "prepare", "queue", "prepare", "tokenized", "queue", "admit", "first token", "last token", "what")
    actors = ("api0", "tokenizer0", "scheduler", "tokenizer0", "tokenizer0", "scheduler", "scheduler", "api0", "api0", "cache")
    events: dict[str, list[TraceEvent]] = defaultdict(list)
    for number, (actor, name) in enumerate(zip(actors, names, strict=True)):
        events[actor].append(TraceEvent(name, 1000 * number, 500, 0, 0, "r" if name in OF_REQUESTS else "from x"))
    drawn = json.loads(document(events, "0123abcd", 3))
    flows = [event["ph"] for event in drawn["traceEvents"] if event["ph"] in "stf"]
    assert "".join(flows) == "s" + "t" * 7 + "f"
    lives = [event["name"] for event in drawn["traceEvents"] if event["ph"] == "b"]
    assert lives == ["sample", "preparing", "waiting", "prefill", "decode"]
    assert drawn["otherData"]["events_lost"] == 3
