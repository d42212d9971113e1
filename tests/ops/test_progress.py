"""Long ops of the reference report progress."""

from __future__ import annotations

import paddle

from ops.paddle import progress
from ops.paddle.reference import TABLE


def test_reference_ops_report_their_end() -> None:
    reports: list[None] = []
    progress.report_progress_to(lambda: reports.append(None))
    try:
        for _ in range(3):
            TABLE.activate_and_multiply(paddle.ones([2, 8]), "silu")
    finally:
        progress.report_progress_to(None)
    assert len(reports) == 3
    TABLE.activate_and_multiply(paddle.ones([2, 8]), "silu")
    assert len(reports) == 3
