"""Client tools find the engine on this machine, like `tokamak top` and `ctl`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.errors import OptionError, TokamakError
from engine.process.run_directory import Manifest, Run, choose_run, new_run_id, runs_root
from engine.supervisor.reaper import create_run, remove_run
from tests.configurations import engine_config
from tools.target import DEFAULT_URL, Target, add_target_arguments, find_target


def find(*arguments: str) -> Target:
    parser = argparse.ArgumentParser()
    add_target_arguments(parser)
    return find_target(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def no_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def run() -> Iterator[Run]:
    """A run owned by this process, of an engine that listens on all addresses and requires a key."""
    run_id = new_run_id()
    run, lock = create_run(run_id, runs_root() / run_id)
    config = engine_config(
        model="/m",
        max_model_len=8,
        num_kv_blocks=2,
        host="0.0.0.0",
        port=4321,
        api_key=("first", "second"),
        run_id=run_id,
        run_dir=str(run.directory),
    )
    run.write_manifest(Manifest(config, (), os.getpid(), time.time()))
    yield run
    os.close(lock)
    remove_run(run)


def test_the_engine_that_runs_here(run: Run) -> None:
    for arguments in ((), ("--run", run.run_id[:4]), ("--run-dir", str(run.directory))):
        target = find(*arguments, "--api-key", "mine")
        assert (target.url, target.port, target.api_key) == ("http://127.0.0.1:4321", 4321, "mine")
    assert find("--url", "http://[::1]:9/v1").url == "http://[::1]:9"


def test_key_is_read_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokamakError, match="requires an API key; pass one with --api-key or TOKAMAK_API_KEY"):
        find()
    monkeypatch.setenv("TOKAMAK_API_KEY", "first,second")
    assert find().api_key == "first"


def test_several_engines_are_listed_and_none_is_taken(run: Run) -> None:
    run_id = new_run_id()
    other, lock = create_run(run_id, runs_root() / run_id)
    config = run.manifest().config
    other.write_manifest(
        Manifest(msgspec.structs.replace(config, port=5432, run_id=other.run_id, api_key=()), (), os.getpid(), time.time())
    )
    try:
        for find_one in (find, choose_run):
            with pytest.raises(TokamakError, match="2 engines are running; choose one with --run or --run-dir") as refused:
                find_one()
            for each, url in ((run, "http://127.0.0.1:4321"), (other, "http://127.0.0.1:5432")):
                assert f"--run {each.run_id}  test  {url}  {each.directory}" in str(refused.value)
        assert find("--run", other.run_id).port == 5432
        assert find("--run-dir", str(other.directory)).port == 5432
    finally:
        os.close(lock)
        remove_run(other)
    assert choose_run() == run
    assert find("--api-key", "mine").port == 4321


def test_no_engine_runs(run: Run) -> None:
    run.lock_path.write_text("")  # as of an owner that is dead
    assert find().url == DEFAULT_URL
    with pytest.raises(TokamakError, match=f"engine {run.run_id} is not running"):
        find("--run", run.run_id)
    with pytest.raises(TokamakError, match="no run feed"):
        find("--run", "feed")
    with pytest.raises(OptionError, match="expected a URL such as"):
        find("--url", "127.0.0.1:80")


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:x", "ftp://h", "http://h/\u00fc", "http://1.2.3.4 5", "http://h\n"]
)
def test_wrong_url_is_named(url: str) -> None:
    with pytest.raises(OptionError, match="--url"):
        find("--url", url)


@pytest.mark.parametrize("key", ["\u043a\u043b\u044e\u0447", "key\n", "\udcff"])
def test_key_that_no_header_can_have_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match="--api-key"):
        find("--url", DEFAULT_URL, "--api-key", key)
