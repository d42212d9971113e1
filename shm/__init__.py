"""Shared memory of Tokamak's actors: segments, rings, mailboxes, slabs and the counters file.

Thin Python over one small native module. Read `native/layout.h` first: it has the byte layout of every shared struct and the
rule of every atomic word; then `mailbox.py`. Imports nothing from the engine.

    native/  C++: atomics, futex waits, rings, counters
"""
