"""The supervisor's child `arena<r>`: allocates the KV arena of rank r in device memory, passes its descriptor up, and ends.

Run by `engine/supervisor/device_arenas.py`. So the supervisor needs no driver and no device context, and no worker owns the
memory that must survive it.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from shm.errors import SharedMemoryError

NOT_SHARED = 3  # exit code: the card has room, but its memory cannot be passed on


class DeviceArena(msgspec.Struct, frozen=True):
    """Device memory held by the supervisor, as described to a rank."""

    library: str  # the driver's
    card: int
    num_bytes: int
    socket: int  # descriptor of the socket to the supervisor


def main(argument: str) -> int:
    """Return the exit code; errors are on stderr."""
    # imports ctypes: not for the supervisor, which uses only `DeviceArena`
    from shm.device_memory import DeviceMemory, NotSharedError

    arena = msgspec.json.decode(argument, type=DeviceArena)
    try:
        descriptor = DeviceMemory(arena.library, arena.card).create(arena.num_bytes)
    except SharedMemoryError as error:
        print(error, file=sys.stderr)
        return NOT_SHARED if isinstance(error, NotSharedError) else 1
    with socket.socket(fileno=arena.socket) as up:
        socket.send_fds(up, [b"."], [descriptor])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
