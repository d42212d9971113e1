"""How many threads this rank's matrix products use. Imports no Paddle: it must run before Paddle does.

The BLAS and OpenMP pools inside Paddle read their size from the environment, once, when they are loaded; there is no call for
it. This is the one place that writes the environment, and nothing reads it back.
"""

from __future__ import annotations

import os


def limit_threads(num_threads: int) -> None:
    """Let Paddle, when it is imported after this, use `num_threads` threads, which sleep between two products (the other actors
    need the cores)."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["KMP_BLOCKTIME"] = "0"
