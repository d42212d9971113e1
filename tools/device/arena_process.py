"""Process that writes or reads an arena in a card's memory: `python -m tools.device.arena_process write|read LIBRARY DESCRIPTOR
NUM_BYTES`. Prints the digest of the bytes there. Started by `machine.py`, which kills the writer.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from shm.device_memory import DeviceMemory
from tools.device.card import Card


def main(order: str, library: str, descriptor: int, num_bytes: int) -> None:
    address, card = DeviceMemory(library, 0).map(descriptor, num_bytes), Card(library, 0)
    if order == "write":
        card.send(np.random.default_rng(31).integers(0, 256, num_bytes, np.uint8), address)
    found = card.fetch(address, np.empty(num_bytes, np.uint8))
    print(hashlib.blake2b(found.tobytes(), digest_size=8).hexdigest(), flush=True)
    if order == "write":
        sys.stdin.read()  # until it is killed


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
