"""Whole models with each variant of the kernels: transformers' outputs, and an answer's bits independent of others. Dense
layers on several ranks are in `rank_group/test_tensor_parallel.py`, engines in `tests/e2e/test_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ops import _cpu
from tests.ops.tables import table
from tests.paths import GOLDEN
from tests.workers.rank_group.serving import Answers, sequences
from tests.workers.rank_group.test_tensor_parallel import PRECISIONS
from tests.workers.serving import ARCHITECTURES, Serving, golden_sequences, make_runner
from tests.workers.test_golden import check_golden, side_by_side


@pytest.fixture(params=_cpu.variants(), autouse=True)
def variant(request: pytest.FixtureRequest) -> Iterator[None]:
    with table(f"{request.param}-1"):
        yield


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_agrees_with_transformers(architecture: str) -> None:
    found = golden_sequences(architecture)
    side_by_side(make_runner(GOLDEN / architecture), found)
    check_golden(found, architecture)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_mixtures_and_latents_keep_their_bits(architecture: str, precision: str) -> None:
    """Alone in small pieces, and together in larger ones."""
    assert answers(architecture, PRECISIONS[precision], 9, is_alone=True) == answers(architecture, PRECISIONS[precision], 40)


def answers(architecture: str, precision: dict[str, Any], chunk: int, is_alone: bool = False) -> Answers:
    serving, batch = Serving(make_runner(GOLDEN / architecture, num_kv_blocks=64, **precision), chunk=chunk), sequences()
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    for beside in [[sequence] for sequence in batch] if is_alone else [batch]:
        serving.run(beside)
    return [sequence.answer() for sequence in batch]
