"""Settings of the BLAS inside Paddle. Imports no Paddle: they must be set before Paddle is loaded.

The BLAS and its OpenMP pool read their settings from the environment, once, when they are loaded; there is no function for
them. This is the only place that writes the environment, and none of our code reads it back.
"""

from __future__ import annotations

import os
from pathlib import Path


def configure_blas(num_threads: int) -> None:
    """Set the number of threads that Paddle will use, which sleep between two products, because the other actors need the
    cores. On processors that are not Intel's, MKL must be told to use AVX2."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["KMP_BLOCKTIME"] = "0"
    processor = Path("/proc/cpuinfo").read_text()
    if "AuthenticAMD" in processor and " avx2 " in processor and " fma " in processor:
        os.environ["MKL_DEBUG_CPU_TYPE"] = "5"
