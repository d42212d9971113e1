"""The choice of kernels from made-up timings, as a pure function."""

from __future__ import annotations

import pytest

from ops.cpu.choice import ATTENTION, BASE, LINEARS, TIMED, choose, kernels_of

ORDER = ["avx2", "avx512", "avx512bf16", "amx"]


def slower(*factors: float) -> list[float]:
    """Return the seconds of 1, 16 and 128 rows, `factors` times those of the base."""
    return [factor * seconds for factor, seconds in zip(factors, (1e-4, 2e-4, 1e-3), strict=True)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        pytest.param({"avx2": slower(2, 2, 2), "avx512": slower(1, 1, 1)}, "avx512", id="the fastest"),
        pytest.param({"avx2": slower(1, 1, 1), "avx512": slower(1.3, 1.3, 1.3)}, "avx2", id="whatever its name"),
        pytest.param({"avx2": slower(1, 1, 1), "avx512": slower(1.04, 1.04, 1.04)}, "avx512", id="a tie goes to the later"),
        pytest.param({"avx2": slower(1, 1, 1), "avx512": slower(1.06, 1.06, 1.06)}, "avx2", id="no tie"),
        pytest.param(
            {"avx512": slower(1, 1, 1), "avx512bf16": slower(1, 1.6, 2.3)},
            "avx512",
            id="bfloat16 products slower than widening",
        ),
        pytest.param(
            {"avx512": slower(1.1, 2, 2), "avx512bf16": slower(1, 1, 1)}, "avx512bf16", id="bfloat16 products that are fast"
        ),
        pytest.param({"avx512bf16": slower(1, 9, 20), "amx": slower(2, 1, 1)}, "amx", id="tiles lose one row and win the rest"),
        pytest.param({"avx512": slower(1, 1, 1.9), "amx": slower(2, 1, 1)}, "amx", id="what is lost is made up for, about"),
        pytest.param({"avx512": slower(1, 1, 1.5), "amx": slower(2, 1, 1)}, "avx512", id="or is not"),
        pytest.param({"avx512": slower(1, 1, 1)}, "avx512", id="nothing to choose"),
    ],
)
def test_by_rates(times: dict[str, list[float]], chosen: str) -> None:
    order = [variant for variant in ORDER if variant in times]
    assert choose(times, order) == chosen
    assert choose(dict(reversed(times.items())), order) == chosen, "the order of the table says nothing"
    assert choose({variant: [100 * each for each in seconds] for variant, seconds in times.items()}, order) == chosen


def test_ties_are_with_the_best_alone() -> None:
    """A chain of neighbouring ties does not lead away from the best."""
    times = {"avx2": slower(1, 1, 1), "avx512": slower(1.04, 1.04, 1.04), "amx": slower(1.08, 1.08, 1.08)}
    assert choose(times, ["avx2", "avx512", "amx"]) == "avx512"


def test_the_parts_of_an_engine() -> None:
    """Attention as timed with its type of keys and values."""
    chosen = {**dict.fromkeys(TIMED, "avx512"), "int8": "amx", "attention bfloat16": "avx2"}
    found = kernels_of(chosen, "amx", "bfloat16")
    assert found == {BASE: "amx", **dict.fromkeys(LINEARS, "avx512"), "int8": "amx", ATTENTION: "avx2"}
    assert kernels_of(chosen, "amx", "float32")[ATTENTION] == "avx512"
