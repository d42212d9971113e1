"""Runs and the reaper: the remains of dead engines are removed, and nothing else is touched."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import OptionError, StartError, TokamakError
from engine.messages import WeightsState
from engine.process.run_directory import Manifest, Run, WeightsRecord, choose_run, find_runs, new_run_id, open_run, runs_root
from engine.process.topology import ActorPlan
from engine.supervisor.reaper import create_run, reap, remove_run
from shm.counters import Counters
from shm.inspection import rings
from shm.process import ProcessIdentity, boot_id
from shm.segment import DIRECTORY, Segment, segment_name, segment_names, segment_prefix, unlink_segment
from tests.configurations import engine_config
from tests.engine.echo_engine import REPOSITORY, is_gone
from tests.waiting import wait_until

# A process that makes a run with a segment and a child, says so, and waits to be killed.
OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from engine.supervisor.reaper import create_run
from engine.process.run_directory import Manifest
from engine.metrics import EVERY_ROLE
from engine.process.topology import ActorPlan
from shm.counters import Counters
from shm.process import ProcessIdentity
from tests.engine.process.test_run import configuration
run_id, directory = sys.argv[1], Path(sys.argv[2])
run, lock = create_run(run_id, directory)
run.write_manifest(Manifest(configuration(run_id, directory), (ActorPlan("echo0", "x:y"),), os.getpid(), time.time()))
run.log_path("echo0").write_text("log")
counters = Counters.create(run_id, ("supervisor", "echo0"), lambda role: EVERY_ROLE)
child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
row = counters.actor("echo0")
row.begin_epoch(1, 1)
row.set_process(ProcessIdentity.of(child.pid))
print(child.pid, flush=True)
sys.stdin.read()
"""


# Makes a run as one that had children, and removes it; killed at its n-th removal of a file or directory.
REMOVER = """
import os, signal, sys, time
from pathlib import Path
from engine.supervisor.reaper import create_run, remove_run
from engine.process.run_directory import Manifest, WeightsRecord
from engine.process.topology import ActorPlan
from tests.engine.process.test_run import configuration
run_id, directory, num_left = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
run, lock = create_run(run_id, directory)
run.write_manifest(Manifest(configuration(run_id, directory), (ActorPlan("echo0", "x:y"),), os.getpid(), time.time()))
run.write_weights(WeightsRecord.of_start(configuration(run_id, directory)))
run.log_path("echo0").write_text("log")
for number in ("manifest", "weights"):
    (directory / f".{number}.json.new").write_text("half")
def hook(event, arguments):
    global num_left
    if event in ("os.remove", "os.rmdir"):
        num_left -= 1
        if num_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
remove_run(run)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return runs_root()


def configuration(run_id: str, directory: Path) -> EngineConfig:
    return engine_config(
        model="/none", max_model_len=8, num_kv_blocks=1, kv_cache_bytes=1, run_id=run_id, run_dir=str(directory)
    )


class Owner:
    """A process with the program above."""

    def __init__(self, run_id: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, run_id, str(directory)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.child_pid = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(root: Path) -> Iterator[Owner]:
    run_id = new_run_id()
    living = Owner(run_id, root / run_id)
    yield living
    living.kill()
    reap(root)


def test_only_dead_runs_are_removed(root: Path, owner: Owner) -> None:
    [run] = find_runs()
    assert run.is_alive()
    assert run.run_id not in reap(root)
    assert choose_run(run.run_id[:4]) == run
    owner.kill()
    assert not run.is_alive()
    assert not is_gone(owner.child_pid)
    assert find_runs() == [run]  # still readable until the next start
    assert run.run_id in reap(root)
    assert not run.directory.exists()
    assert segment_names(run.run_id) == []
    wait_until(lambda: is_gone(owner.child_pid), what="the child that outlived its parent is ended")


def test_reused_pid_is_not_killed(root: Path, owner: Owner) -> None:
    [run] = find_runs()
    counters = Counters.attach(run.run_id)
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        identity = ProcessIdentity.of(bystander.pid)
        earlier = ProcessIdentity(identity.pid, identity.start_ticks - 1, identity.boot_id)
        counters.actor("echo0").set_process(earlier)
        counters.close()
        owner.kill()
        assert run.run_id in reap(root)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        os.kill(owner.child_pid, signal.SIGKILL)


def test_dead_run_is_found_by_its_link(root: Path, tmp_path: Path) -> None:
    run_id, directory = new_run_id(), tmp_path / "elsewhere"
    elsewhere = Owner(run_id, directory)
    (directory / "notes.txt").write_text("mine")
    assert [run.directory for run in find_runs()] == [directory]
    elsewhere.kill()
    run, lock = create_run(new_run_id(), root / "00000000")
    os.close(lock)
    assert segment_names(run_id) == []
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
    assert not (root / run_id).is_symlink()
    remove_run(run)


def test_run_directory_is_reused_after_a_death(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is found without the link too, because the dead engine had another XDG_RUNTIME_DIR."""
    directory = tmp_path / "elsewhere"
    first = Owner(new_run_id(), directory)
    first.kill()
    other_root = tmp_path / "other"
    other_root.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other_root))
    run, lock = create_run(new_run_id(), directory)
    assert run.is_alive()
    with pytest.raises(StartError, match="in use by another engine"):
        create_run(new_run_id(), directory)
    remove_run(run)
    os.close(lock)
    assert not directory.exists()
    reap(root)


def test_killed_at_any_moment_of_the_removal(root: Path) -> None:
    """The next start removes the remains of a dead engine."""
    for num_removals in range(24):
        run_id = new_run_id()
        arguments = [run_id, str(root / run_id), str(num_removals)]
        done = subprocess.run([sys.executable, "-c", REMOVER, *arguments], cwd=REPOSITORY, check=False)
        is_killed = done.returncode == -signal.SIGKILL
        assert (root / run_id).exists() is is_killed
        if not is_killed:
            assert done.returncode == 0
            assert num_removals > 8
            return
        assert run_id in reap(root)
        assert not (root / run_id).exists(), f"left after removal {num_removals}: {os.listdir(root / run_id)}"
    raise AssertionError("the removal never came to its end")


def test_directory_without_a_lock_is_removed(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "0123abcd").mkdir(mode=0o700)
    (root / "not-a-run").mkdir()
    assert "0123abcd" in reap(root)
    assert [path.name for path in root.iterdir()] == ["not-a-run"]


def test_only_segments_of_dead_creators_are_removed(root: Path) -> None:
    root.mkdir(mode=0o700)
    mine, dead = new_run_id(), new_run_id()
    Segment.create(segment_name(mine, "test", "a"), 4096)
    code = f"from shm.segment import *; Segment.create(segment_name('{dead}', 'test', 'a'), 4096)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    reaped = reap(root)
    assert dead in reaped
    assert mine not in reaped
    assert segment_names(dead) == []
    assert unlink_segment(segment_name(mine, "test", "a"))


def test_a_root_that_others_may_enter_is_refused(root: Path) -> None:
    root.mkdir(mode=0o755)
    with pytest.raises(StartError, match="mode 755"):
        create_run(new_run_id(), root / "01234567")


def test_documents(root: Path) -> None:
    run_id = new_run_id()
    run, lock = create_run(run_id, root / run_id)
    config = configuration(run_id, run.directory)
    manifest = Manifest(config, (ActorPlan("echo0", "a:b"),), 1, 2.0)
    run.write_manifest(manifest)
    assert open_run(run.directory) == run
    assert run.manifest() == manifest
    others = msgspec.json.decode(run.manifest_path.read_bytes())
    del others["config"]["port"]  # as another version wrote it
    run.manifest_path.write_bytes(msgspec.json.encode(others))
    assert run.log_path("echo0") in run.files()
    run.write_weights(WeightsRecord.of_start(config))
    record = WeightsRecord("/w", 3, 4, WeightsState.CLEARED, (("/v", 2), ("/w", 3)))
    run.write_weights(record)
    assert run.weights() == record
    assert sorted(path.name for path in run.directory.iterdir()) == ["lock", "manifest.json", "weights.json"]
    run.write(run.order_path, b"{}")  # of a router that ends meanwhile
    remove_run(run)
    assert not run.directory.exists()
    os.close(lock)
    with pytest.raises(TokamakError, match="manifest"):
        open_run(run.directory)
    with pytest.raises(TokamakError, match="no engine"):
        choose_run()


def put_loop(path: Path) -> None:
    path.symlink_to(path)


def put_garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def put_unreadable(path: Path) -> None:
    path.touch(mode=0)


def put_huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


HOSTILE = (put_loop, os.mkfifo, os.mkdir, put_garbage, put_unreadable, put_huge)


@pytest.mark.parametrize("put", HOSTILE)
def test_unreadable_shared_memory_is_left_alone(root: Path, put: Callable[[Path], None]) -> None:
    """Any user may create any of these there; the next start, and `tokamak top`, must work."""
    root.mkdir(mode=0o700)
    run_id, dead = new_run_id(), new_run_id()
    code = f"from shm.counters import Counters; Counters.create('{dead}', ('supervisor',), lambda role: ())"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    names = [f"{run_id}.x.y", f"{run_id}.counters.main", f"\udcff{run_id}.x", f"[{run_id}.*.x", f".{run_id}.."]
    paths = [DIRECTORY / f"{segment_prefix()[1:]}{name}" for name in names]
    try:
        for path in paths:
            put(path)
        assert rings(run_id) == []
        assert dead in reap(root)
        assert all(map(os.path.lexists, paths))
        run, lock = create_run(run_id, root / run_id)  # it ends as well under whatever has its name
        os.close(lock)
        remove_run(run)
        assert not run.directory.exists()
    finally:
        for path in filter(os.path.lexists, paths):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("put", HOSTILE)
def test_unreadable_runs_are_left_alone(root: Path, owner: Owner, put: Callable[[Path], None]) -> None:
    [living] = find_runs()
    put(root / "00000000")
    for number, name in enumerate(("lock", "manifest.json")):
        (root / f"0000000{number + 1}").mkdir(mode=0o700)
        put(root / f"0000000{number + 1}" / name)
    assert find_runs() == [living]
    assert choose_run() == living
    with pytest.raises(TokamakError, match="manifest"):
        open_run(root / "00000000")
    assert living.run_id not in reap(root)
    owner.kill()
    assert living.run_id in reap(root)
    run, lock = create_run("0000000a", root / "0000000a")
    os.close(lock)
    remove_run(run)


def test_runs_writable_by_others_are_ignored(root: Path, owner: Owner) -> None:
    """A command must not go to the socket of another user, who made /tmp/tokamak-<uid> first."""
    assert len(find_runs()) == 1
    root.chmod(0o755)
    assert find_runs() == []
    root.chmod(0o700)


def test_removed_directory_of_a_living_engine(root: Path, tmp_path: Path) -> None:
    """The link is dangling, but the shared memory is locked."""
    run_id, directory = new_run_id(), tmp_path / "elsewhere"
    living = Owner(run_id, directory)
    try:
        shutil.rmtree(directory)
        with open(DIRECTORY / segment_name(run_id, "counters", "main")[1:], "rb") as counters_file:
            fcntl.flock(counters_file, fcntl.LOCK_SH)
            assert run_id not in reap(root)
            assert segment_names(run_id)
        assert run_id in reap(root)
        assert not segment_names(run_id)
    finally:
        living.kill()
        os.kill(living.child_pid, signal.SIGKILL)


@pytest.mark.parametrize("pid", ["0", "-1", "9" * 30])
def test_lock_with_an_impossible_owner_is_dead(root: Path, pid: str) -> None:
    run_id = new_run_id()
    run, lock = create_run(run_id, root / run_id)
    os.close(lock)
    run.lock_path.write_text(f"{pid} 1 {boot_id()}")
    assert run.owner() is None
    assert run_id in reap(root)
    assert not run.directory.exists()


def test_socket_paths_are_checked() -> None:
    with pytest.raises(OptionError, match="the limit is 107"):
        Run("01234567", Path("/" + "x" * 100)).check_path()


def test_segments_held_by_an_invisible_process_stay(root: Path) -> None:
    """Containers share /dev/shm: a pid of another container means nothing here, its lock does."""
    root.mkdir(mode=0o700)
    run_id = new_run_id()
    code = f"from shm.counters import Counters; Counters.create('{run_id}', ('supervisor',), lambda role: ())"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    with open(DIRECTORY / segment_name(run_id, "counters", "main")[1:], "rb") as counters_file:
        fcntl.flock(counters_file, fcntl.LOCK_SH)
        assert run_id not in reap(root)
    assert run_id in reap(root)


def test_segments_of_another_user_stay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o700)
    run_id = new_run_id()
    code = f"from shm.counters import Counters; Counters.create('{run_id}', ('supervisor',), lambda role: ())"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "getuid", lambda: 4_000_000_000)
        assert run_id not in reap(root)
    assert run_id in reap(root)
