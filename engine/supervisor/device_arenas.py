"""KV arenas in device memory, which survive the workers: one per rank, created by a child (`engine/process/device_arena.py`)
that ends when the supervisor has its descriptor. Used at the start of an engine.

Also the sockets that keep descriptors of weights there (`workers/devices/cuda/shelf.py`)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec

from engine.errors import StartError
from engine.installation import PACKAGES, python_environment
from engine.process.device_arena import NOT_SHARED, DeviceArena
from shm.sizes import size_text

_LOG = logging.getLogger(__name__)
_LONGEST_S = 120.0  # seconds for the driver's first call and the allocation


@contextlib.contextmanager
def device_arenas(
    library: str, num_ranks: int, num_bytes: int, note: Callable[[str], None] = _LOG.warning
) -> Iterator[list[int]]:
    """Yield a descriptor per rank, valid until the end; none without a `library`. Raises StartError if a device has no room or
    no driver. -1: the driver cannot pass the memory on, so the worker allocates its own; `note` gets one line about these."""
    with contextlib.ExitStack() as open_until_end:
        children = [_start(library, rank, num_bytes) for rank in range(num_ranks if library else 0)]
        found, causes = [], {}
        for rank, (child, way) in enumerate(children):
            open_until_end.callback(_end, child)
            with way:
                descriptor, causes[rank] = _received(rank, child, way, num_bytes)
            if descriptor >= 0:
                open_until_end.callback(os.close, descriptor)
            found.append(descriptor)
        if alone := [rank for rank, descriptor in enumerate(found) if descriptor < 0]:
            note(
                f"KV cache of GPU {', '.join(map(str, alone))} ends with its worker: the driver cannot share memory between "
                f"processes ({causes[alone[0]]}); after a worker's death, running requests are computed again"
            )
        yield found


@contextlib.contextmanager
def weight_shelves(arenas: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield a pair of sockets for each of the ranks' `arenas`: what one life of a worker sends, descriptors of memory included,
    the next one receives. -1: the driver cannot share memory."""
    with contextlib.ExitStack() as open_until_end:
        found = []
        for arena in arenas:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if arena >= 0 else ()
            for each in pair:
                open_until_end.enter_context(each)
            found.append((pair[0].fileno(), pair[1].fileno()) if pair else (-1, -1))
        yield found


def _start(library: str, rank: int, num_bytes: int) -> tuple[subprocess.Popen[str], socket.socket]:
    own, given = socket.socketpair()
    own.settimeout(_LONGEST_S)
    with given:
        arena = msgspec.json.encode(DeviceArena(library, rank, num_bytes, given.fileno())).decode()
        command = [sys.executable, "-m", "engine.process.device_arena", arena]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PACKAGES,
            env=python_environment(os.environ),
            pass_fds=[given.fileno()],
        )
    return child, own


def _received(rank: int, child: subprocess.Popen[str], way: socket.socket, num_bytes: int) -> tuple[int, str]:
    """Return the descriptor, or -1 and why the memory cannot be passed on."""
    try:
        _, descriptors, _, _ = socket.recv_fds(way, 1, 1)
    except TimeoutError:
        descriptors, cause = [], f"timed out after {_LONGEST_S:.0f} s"
    else:
        cause = "" if descriptors else child.communicate(timeout=_LONGEST_S)[1].strip() or f"exit code {child.returncode}"
    if child.returncode == NOT_SHARED:
        return -1, cause
    if not descriptors:
        raise StartError(
            f"arena{rank}: the KV arena of {size_text(num_bytes)} cannot be allocated on GPU {rank}: {cause}; make it smaller "
            "(--num-kv-blocks or --gpu-memory-utilization), or check the driver (nvidia-smi)"
        )
    os.set_inheritable(descriptors[0], False)
    return descriptors[0], ""


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()
