"""Process identities: a reused pid is another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from shm import _native
from shm.process import ProcessIdentity
from tests.waiting import wait_until


def test_living_process_is_alive() -> None:
    identity = ProcessIdentity.of()
    assert identity.pid == os.getpid()
    assert identity.start_ticks > 0
    assert identity.is_alive()
    assert identity == ProcessIdentity.of(os.getpid())


def test_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_alive()
    child.send_signal(signal.SIGKILL)
    wait_until(lambda: not identity.is_alive(), what="the zombie to count as dead")
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    assert not identity.is_alive()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(child.pid)


def test_reused_pid_is_another_process() -> None:
    identity = ProcessIdentity.of()
    assert not msgspec.structs.replace(identity, start_ticks=identity.start_ticks - 1).is_alive()
    assert not msgspec.structs.replace(identity, boot_id="of another boot").is_alive()


def test_command_with_spaces_and_parentheses_is_parsed() -> None:
    program = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a ) R 1 (b'); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert ProcessIdentity.of(child.pid).is_alive()


def test_process_dies_with_its_parent() -> None:
    grandchild = "import os, shm._native; shm._native.set_parent_death_signal(9); print(os.getpid(), flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    child = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        identity = ProcessIdentity.of(int(child.stdout.readline()))
        child.kill()
        wait_until(lambda: not identity.is_alive(), what="the grandchild to die")


def test_parent_death_signal_is_checked() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        _native.set_parent_death_signal(1000)
