"""Parts of different variants together: each part is computed as by its own variant, and variants of one family give the same
bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ops import _cpu
from ops.cpu.choice import ATTENTION, KV_TYPES, LINEARS
from ops.cpu.table import TABLE as k
from ops.modules import AttentionShape, KvCache, LatentShape, Linear, Norm
from ops.weight_format import QuantizedWeight, Values, WeightFormat
from tests.ops.latents import LatentRows
from tests.ops.packing import pack
from tests.ops.steps import HandMadeStep

PARTS = (*LINEARS, ATTENTION)
FORMATS = {
    "float32": [WeightFormat("float32")],
    "bfloat16": [WeightFormat("bfloat16")],
    "int8": [WeightFormat("int8"), WeightFormat("int8", 64), WeightFormat("int8", 32, scales="bfloat16")],
    "int4": [WeightFormat("int4", 32), WeightFormat("int4", 32, is_folded=True), WeightFormat("int4", 128, is_folded=True)],
    "float4": [WeightFormat("float4", 32)],
}
SHAPES = ((300, 70), (129, 37), (64, 33))
SEQUENCES = [(3, 0, 100), (1, 70, 9), (7, 200, 1), (9, 3, 17)]
PAIRS = list(itertools.permutations(_cpu.variants(), 2))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def linear(kind: str) -> np.ndarray:
    """Return results for all formats, shapes and ways of rows; numbers of all sizes, the smallest too."""
    results = []
    for format, (num_inputs, num_outputs) in itertools.product(FORMATS[kind], SHAPES):
        module = Linear(("w",), num_inputs, (num_outputs,), has_bias=True, format=format)
        weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
        weight[:2] *= np.float32(1e-30)
        with one_variant():
            pack(k, module, weight=stored(weight, format), bias=bias * np.float32(1e-38))
        x = random(40, num_inputs, seed=3)
        x[::3] *= np.float32(1e-12)
        results += [k.linear(x[:rows], module).numpy().ravel().copy() for rows in (1, 3, 16, 40)]
    return np.concatenate(results)


def stored(weight: np.ndarray, format: WeightFormat) -> Values:
    """Return int4 that is not folded, and float4; they come only from checkpoints."""
    if format.kind not in ("int4", "float4") or format.is_folded:
        return weight
    num_groups = -(-weight.shape[1] // format.group_size)
    integers = np.abs(weight * 5).astype(np.uint8) % 16
    return QuantizedWeight(format, integers, np.abs(random(len(weight), num_groups, seed=4)))


def attention() -> np.ndarray:
    results = []
    for dtype, shape in itertools.product(KV_TYPES, (AttentionShape(4, 2, 32), AttentionShape(6, 1, 24, 100))):
        step = HandMadeStep(SEQUENCES, row_tile=1)
        with one_variant():
            cache = step.cache(k, shape.num_kv_heads, shape.head_dim, dtype)
        queries = random(step.inputs.num_rows, shape.queries_width)
        results.append(k.attention(k.begin(step.inputs, cache), queries, shape, cache.layers[0]).numpy().ravel().copy())
    for dtype in KV_TYPES:
        results.append(latent_attention(dtype))
    return np.concatenate(results)


def latent_attention(dtype: str) -> np.ndarray:
    shape = LatentShape(7, 3, 8, 40, 0.2)
    with one_variant():
        rows = LatentRows(k, shape, 16, dtype)
        _, layer, step = rows.run_in_cache([[(3, 0, 100)]])
        step.set([(3, 60, 40)])
        begun = k.begin(step.inputs, KvCache(16, [layer]))
    queries, absorbed = random(40, shape.queries_width), random(40, shape.num_heads * shape.latent_dim, seed=1)
    return k.latent_attention(begun, absorbed, queries, shape, layer).numpy().ravel().copy()


@contextmanager
def one_variant() -> Iterator[None]:
    """Select the portable variant for everything within the block, including the rounding of stored weights, keys and values,
    which is no part."""
    before = composition()
    _cpu.select("portable")
    yield
    select(before)


def norm() -> np.ndarray:
    module = Norm("n", 100, 1e-6)
    pack(k, module, weight=random(100, seed=1))
    values: np.ndarray = k.rms_norm(random(7, 100), module).numpy().copy()
    return values


def composition() -> dict[str, str]:
    return {"base": _cpu.variant(), **{part: _cpu.variant_of(part) for part in PARTS}}


def select(parts: dict[str, str]) -> None:
    assert _cpu.select(parts["base"])
    assert all(_cpu.select_part(part, parts[part]) for part in PARTS)


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    before = composition()
    yield
    select(before)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, np.ndarray]]:
    """Results of each variant, for each part."""
    found = {}
    before = composition()
    for variant in _cpu.variants():
        _cpu.select(variant)
        found[variant] = {part: result() for part, result in RESULTS.items()}
    select(before)
    return found


RESULTS: dict[str, Callable[[], np.ndarray]] = {
    "base": norm,
    **{kind: lambda kind=kind: linear(kind) for kind in LINEARS},  # type: ignore[misc]
    ATTENTION: attention,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_family_gives_the_same_bits(part: str, alone: dict[str, dict[str, np.ndarray]]) -> None:
    for one, other in PAIRS:
        if _cpu.families(one)[part] == _cpu.families(other)[part]:
            np.testing.assert_array_equal(alone[one][part].view(np.uint32), alone[other][part].view(np.uint32))


@pytest.mark.parametrize("part", ["int8", "int4", "float4"])
def test_integers_are_one_family(part: str) -> None:
    """Sums are integers; the only difference is whether the processor rounds a multiply-add once."""
    assert len({_cpu.families(variant)[part] for variant in _cpu.variants() if variant != "portable"}) <= 1


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("base", "other"), PAIRS)
def test_a_part_of_another_variant(part: str, base: str, other: str, alone: dict[str, dict[str, np.ndarray]]) -> None:
    """The part computes as that variant, and everything else as the base, in any order of calls."""
    assert _cpu.select(base)
    assert _cpu.select_part(part, other)
    assert composition() == {"base": base, **dict.fromkeys(PARTS, base), part: other}
    for name in ("base", part, PARTS[PARTS.index(part) - 1]):
        expected = alone[other if name == part else base][name]
        np.testing.assert_array_equal(RESULTS[name]().view(np.uint32), expected.view(np.uint32))
    assert _cpu.select_part(part, base)
    assert composition() == {"base": base, **dict.fromkeys(PARTS, base)}


def test_paired_products_depend_on_attention() -> None:
    for base, other in PAIRS:
        _cpu.select(other)
        expected = _cpu.has_paired_products()
        _cpu.select(base)
        _cpu.select_part(ATTENTION, other)
        assert _cpu.has_paired_products() == expected


def test_unknown_variants_are_refused() -> None:
    before = composition()
    assert not _cpu.select("sse9")
    assert not _cpu.select_part("int8", "sse9")
    with pytest.raises(ValueError, match="there is no norms"):
        _cpu.select_part("norms", _cpu.variant())
    assert composition() == before
    assert set(_cpu.candidates()) <= set(_cpu.variants())
    assert "wide" not in _cpu.candidates()


@pytest.mark.parametrize("variant", _cpu.variants())
def test_units(variant: str) -> None:
    """Each runs and reports its number of operations."""
    units = _cpu.units(variant)
    assert {"float32 FMA", "int8 dot", "int4 dot"} <= set(units)
    for unit in units:
        once = _cpu.run_unit(variant, unit, 10)
        assert once > 0
        assert _cpu.run_unit(variant, unit, 30) == 3 * once
    with pytest.raises(ValueError, match="there is no float8"):
        _cpu.run_unit(variant, "float8", 1)
