"""Fixtures of the shared-memory tests: a run id; its segments are removed afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from shm.segment import segment_names, unlink_segment


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = secrets.token_hex(4)
    yield run_id
    for name in segment_names(run_id):
        unlink_segment(name)
