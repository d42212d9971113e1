"""Tests of the ops run Paddle as a worker does: the BLAS is set before it is loaded."""

from __future__ import annotations

from workers.blas import configure_blas

configure_blas(1)
