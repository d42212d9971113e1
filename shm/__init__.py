"""Shared memory: segments, rings, mailboxes, slabs and the counters file that Tokamak's actors talk through.

Thin Python over one small native module. Read `native/layout.h` first: it has the bytes of every shared struct and the rule of
every atomic word; then `mailbox.py`. Imports nothing of the engine.

    native/  C++: atomics, futex waits, rings, counters
"""
