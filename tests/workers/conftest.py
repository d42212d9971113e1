"""Fixtures of the worker tests, which run Paddle as a worker does: the BLAS is set before it is loaded."""

from __future__ import annotations

from workers.devices.blas import configure_blas

configure_blas(1)
