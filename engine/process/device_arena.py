"""The child `arena<r>` of the supervisor: makes the KV arena of rank r in its card's memory, passes its descriptor up, ends.

Run by `engine/supervisor/device_arenas.py`. So the supervisor needs no driver and no context on a card, and no worker owns what
is to outlive it.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from shm.errors import SharedMemoryError


class DeviceArena(msgspec.Struct, frozen=True):
    """Memory of a card that the supervisor holds, as a rank is told of it."""

    library: str  # the driver's
    card: int
    num_bytes: int
    socket: int  # the descriptor of the way up


def main(argument: str) -> int:
    """The exit code; what went wrong is on stderr."""
    from shm.device_memory import DeviceMemory  # and ctypes: nothing for the supervisor, which knows `DeviceArena` alone

    told = msgspec.json.decode(argument, type=DeviceArena)
    try:
        descriptor = DeviceMemory(told.library, told.card).create(told.num_bytes)
    except SharedMemoryError as error:
        print(error, file=sys.stderr)
        return 1
    with socket.socket(fileno=told.socket) as up:
        socket.send_fds(up, [b"."], [descriptor])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
