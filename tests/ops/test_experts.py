"""Mixtures of experts: routing and weights, and a row's experts give the results of linears of their shape."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from msgspec.structs import replace

from ops import _cpu
from ops.cpu import table as native
from ops.cpu.executors import Recording
from ops.cpu.table import make_table
from ops.modules import Experts, GateClamp, Linear, Router, RoutingRule
from ops.paddle import reference
from ops.table import OpTable, Routing
from ops.weight_format import BFLOAT16, FLOAT32, Fills, Memory, Parts, QuantizedWeight, WeightFormat
from tests.ops import integers
from tests.ops.packing import pack
from tests.ops.tables import table
from tests.ops.test_int_linear import named
from tests.ops.test_invariance import NUM_ROWS, assert_row_alone

Weight = np.ndarray | QuantizedWeight
FORMATS = [
    *(FLOAT32, BFLOAT16, WeightFormat("int8"), WeightFormat("int8", 16), WeightFormat("int8", 128)),
    *(WeightFormat("int4", 32), WeightFormat("int4", 128, True), WeightFormat("int4", 64, is_folded=True)),
    *(WeightFormat("int8", 32, scales="bfloat16"), WeightFormat("int4", 32, True, scales="float16")),
    WeightFormat("float4", 32, scales="bfloat16"),
]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def router_of(k: OpTable, weight: np.ndarray, rule: RoutingRule, correction: np.ndarray | None = None) -> Router:
    linear = Linear(("gate",), weight.shape[1], (len(weight),))
    module = Router(linear, rule, "" if correction is None else "gate.bias")
    pack(k, module, weight=weight, correction=correction)
    return module


def weights_of(num_experts: int, shape: tuple[int, int], format: WeightFormat, seed: int) -> list[Weight]:
    if format.kind in ("int8", "int4", "float4"):
        return [integers.random_weight(*shape, format, seed + index) for index in range(num_experts)]
    return list(random(num_experts, *shape, seed=seed) / 8)


def experts_of(
    k: OpTable,
    gate_up: list[Weight],
    down: list[Weight],
    format: WeightFormat = FLOAT32,
    biases: tuple[np.ndarray, np.ndarray] | None = None,
    clamp: GateClamp | None = None,
) -> Experts:
    shapes = [(each[0].values if isinstance(each[0], QuantizedWeight) else each[0]).shape for each in (gate_up, down)]
    parts = [
        tuple(Linear((str(index),), shape[1], (shape[0],), biases is not None, format) for index in range(len(gate_up)))
        for shape in shapes
    ]
    module = Experts("experts", *parts, clamp)
    named_weights = {
        f"{part}.{index}": each
        for part, weights in (("gate_up", gate_up), ("down", down))
        for index, each in enumerate(weights)
    }
    for part, values in zip(("gate_up", "down"), biases or ((), ()), strict=True):
        named_weights |= {f"{part}.{index}.bias": each for index, each in enumerate(values)}
    pack(k, module, **named_weights)
    return module


def routing_of(ids: np.ndarray, weights: np.ndarray) -> Routing:
    return Routing(paddle.to_tensor(ids.astype(np.int32)), paddle.to_tensor(weights))


# ------------------------------------------------------------------------------------------------------------- routing


def chosen(scores: np.ndarray, rule: RoutingRule, correction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one row's experts and their weights by the published rule."""
    left = scores + correction
    if rule.num_groups > 1:
        groups = left.reshape(rule.num_groups, -1)
        best = np.argsort(-np.sort(groups)[:, -rule.num_best :].sum(1), kind="stable")[: rule.num_chosen_groups]
        left = np.where(np.isin(np.arange(rule.num_groups), best)[:, None], groups, -np.inf).reshape(-1)
    ids = np.argsort(-left, kind="stable")[: rule.num_chosen]
    weights = scores[ids]
    if rule.is_normalized:
        weights = weights / max(weights.sum() + rule.added_to_sum, rule.smallest_sum)
    return ids, weights * rule.factor


RULES = [
    RoutingRule(2),
    RoutingRule(8, is_normalized=True),
    RoutingRule(3, is_normalized=True, smallest_sum=0.9),
    RoutingRule(1, "sigmoid", factor=2.5),
    RoutingRule(4, "sigmoid", True, 1e-20, 0.0, 2.5, 4, 2),
    RoutingRule(3, "softmax", True, num_groups=12, num_chosen_groups=5),
    RoutingRule(3, "softmax", num_groups=3, num_chosen_groups=2, num_best=1),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("has_correction", [False, True])
def test_routing(k: OpTable, rule: RoutingRule, has_correction: bool) -> None:
    weight, correction, x = random(12, 20, seed=1), random(12, seed=2), random(48, 20)
    routing = k.route(None, paddle.to_tensor(x), router_of(k, weight, rule, correction if has_correction else None))
    logits = x.astype(np.float64) @ weight.T
    scores = 1 / (1 + np.exp(-logits))
    if rule.scoring == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = [chosen(row, rule, correction if has_correction else np.zeros(12)) for row in scores]
    np.testing.assert_array_equal(routing.ids.numpy(), [ids for ids, _ in expected])
    np.testing.assert_allclose(routing.weights.numpy(), [weights for _, weights in expected], rtol=2e-5)


def test_weights_are_scaled_by_expert(k: OpTable) -> None:
    rule, weight, scales, x = RoutingRule(3, is_normalized=True), random(12, 20, seed=1), random(12, seed=2), random(48, 20)
    router, plain = router_of(k, weight, rule), k.route(None, paddle.to_tensor(x), router_of(k, weight, rule))
    router.scales_name = "scales"
    pack(k, router, weight=weight, scales=scales)
    routing = k.route(None, paddle.to_tensor(x), router)
    ids = plain.ids.numpy().copy()
    expected = plain.weights.numpy() * scales[ids]
    np.testing.assert_array_equal(routing.ids.numpy(), ids)
    np.testing.assert_allclose(routing.weights.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_first_of_equal_experts_is_chosen(k: OpTable, scoring: str) -> None:
    """The same holds for equal groups; a row of NaN gets arbitrary experts and does not affect the others."""
    weight = np.zeros((40, 20), np.float32)
    weight[[7, 30, 31]] = 1
    x = np.ones((16, 20), np.float32)
    x[3] = np.nan
    rule = RoutingRule(5, scoring)  # type: ignore[arg-type]
    routing = k.route(None, paddle.to_tensor(x), router_of(k, weight, rule))
    others = np.delete(np.arange(16), 3)
    np.testing.assert_array_equal(routing.ids.numpy()[others], [[7, 30, 31, 0, 1]] * 15)
    grouped = replace(rule, num_groups=10, num_chosen_groups=3)
    routing = k.route(None, paddle.to_tensor(x), router_of(k, weight, grouped))
    np.testing.assert_array_equal(routing.ids.numpy()[others], [[7, 30, 31, 0, 1]] * 15)
    ids = routing.ids.numpy()[3]
    assert ((ids >= 0) & (ids < 40)).all()


def test_row_is_routed_the_same_in_any_batch(k: OpTable) -> None:
    weight = random(37, 64, seed=1)
    for rule in (RoutingRule(4, is_normalized=True), RoutingRule(4, "sigmoid", True, 1e-20)):
        router = router_of(k, weight, rule, random(37, seed=2))
        assert_row_alone(lambda x, router=router: k.route(None, x, router).weights, random(NUM_ROWS, 64), k.row_tile)


# ------------------------------------------------------------------------------------------------------------- experts


def expected_of(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, gate_up: list[Weight], down: list[Weight]) -> np.ndarray:
    """Return the result in float64, with silu."""
    results = np.zeros(x.shape)
    for row, (own, own_weights) in enumerate(zip(ids, weights, strict=True)):
        for expert, weight in zip(own, own_weights, strict=True):
            gate, up = np.split(gate_up[expert] @ x[row].astype(np.float64), 2)
            results[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return results


@pytest.mark.parametrize(("hidden", "inner", "num_experts", "num_chosen"), [(20, 37, 12, 3), (64, 48, 8, 2), (100, 16, 40, 6)])
@pytest.mark.parametrize("has_shared", [False, True])
def test_experts(k: OpTable, hidden: int, inner: int, num_experts: int, num_chosen: int, has_shared: bool) -> None:
    """Gate and up do not end at a panel; some experts have no row, one has all; no expert occurs twice in a row."""
    generator = np.random.default_rng(5)
    gate_up, down = random(num_experts, 2 * inner, hidden, seed=1) / 8, random(num_experts, hidden, inner, seed=2) / 8
    x, shared = random(48, hidden), random(48, hidden, seed=3)
    ids = np.array([generator.permutation(num_experts - 2)[:num_chosen] for _ in x])
    ids[:, 0] = num_experts - 1
    weights = random(48, num_chosen, seed=4)
    module = experts_of(k, list(gate_up), list(down))
    other = paddle.to_tensor(shared) if has_shared else None
    found = k.experts(paddle.to_tensor(x), routing_of(ids, weights), module, "silu", other).numpy()
    expected = expected_of(x, ids, weights, list(gate_up), list(down)) + (shared if has_shared else 0)
    np.testing.assert_allclose(found, expected, atol=3e-5)


def test_experts_with_biases_and_a_clamped_gate(k: OpTable) -> None:
    """The formula of gpt-oss; the router's bias changes the choice, and rows are the same in any company."""
    hidden, inner, num_experts, num_chosen = 64, 37, 6, 2
    gate_up, down = random(num_experts, 2 * inner, hidden, seed=1) / 4, random(num_experts, hidden, inner, seed=2) / 4
    biases = random(num_experts, 2 * inner, seed=3), random(num_experts, hidden, seed=4)
    module = experts_of(k, list(gate_up), list(down), biases=biases, clamp=GateClamp(1.702, 2.0))
    linear = Linear(("gate",), hidden, (num_experts,), has_bias=True)
    router = Router(linear, RoutingRule(num_chosen, is_normalized=True))
    routes, bias = random(num_experts, hidden, seed=5), 4 * random(num_experts, seed=6)
    pack(k, router, weight=routes, bias=bias)
    x = random(NUM_ROWS, hidden)
    routing = k.route(None, paddle.to_tensor(x), router)
    found = k.experts(paddle.to_tensor(x), routing, module, "silu", None).numpy()
    exact = x.astype(np.float64)
    logits = exact @ routes.T + bias
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_chosen]
    np.testing.assert_array_equal(routing.ids.numpy(), ids)
    for row, own in enumerate(ids):
        weights = np.exp(logits[row, own] - logits[row].max())
        expected = np.zeros(hidden)
        for expert, weight in zip(own, weights / weights.sum(), strict=True):
            gate, up = np.split(gate_up[expert] @ exact[row] + biases[0][expert], 2)
            gate, up = np.minimum(gate, 2.0), np.clip(up, -2.0, 2.0)
            expected += weight * (down[expert] @ ((up + 1) * gate / (1 + np.exp(-1.702 * gate))) + biases[1][expert])
        np.testing.assert_allclose(found[row], expected, atol=1e-4)
    assert_row_alone(lambda x: k.experts(x, k.route(None, x, router), module, "silu", x), x, k.row_tile)
    np.testing.assert_array_equal(k.sync_free().experts(paddle.to_tensor(x), routing, module, "silu", None).numpy(), found)


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("format", FORMATS, ids=named)
@pytest.mark.parametrize(("hidden", "inner"), [(128, 192), (100, 37)])
def test_expert_equals_its_linears(variant: str, format: WeightFormat, hidden: int, inner: int) -> None:
    """Bit for bit, however many rows share it: one, a few, hundreds; with one thread and with three."""
    num_experts = 5
    gate_up = weights_of(num_experts, (2 * inner, hidden), format, 10)
    down = weights_of(num_experts, (hidden, inner), format, 20)
    x = random(260, hidden)
    shares = np.array([0.8, 0.1, 0.05, 0.0, 0.05])
    ids = np.random.default_rng(6).choice(num_experts, 260, p=shares)
    with table(f"{variant}-1") as k:
        expected = np.empty((260, hidden), np.float32)
        for expert in range(num_experts):
            first, second = (
                Linear(("w",), width, (height,), format=format) for width, height in ((hidden, 2 * inner), (inner, hidden))
            )
            pack(k, first, weight=gate_up[expert])
            pack(k, second, weight=down[expert])
            rows = ids == expert
            if rows.any():
                expected[rows] = k.linear(k.activate_and_multiply(k.linear(x[rows], first), "gelu"), second).numpy()
        module = experts_of(k, gate_up, down, format)
    ones = np.ones((260, 1), np.float32)
    for threads in (1, 3):
        with table(f"{variant}-{threads}") as k:
            for rows in (slice(0, 1), slice(3, 6), slice(5, 25), slice(0, 260)):
                found = k.experts(x[rows], routing_of(ids[rows, None], ones[rows]), module, "gelu", None)
                np.testing.assert_array_equal(found.numpy(), expected[rows])


@pytest.mark.parametrize("variant", _cpu.variants())
@pytest.mark.parametrize("format", FORMATS, ids=named)
def test_a_row_is_the_same_in_any_company(variant: str, format: WeightFormat) -> None:
    weights = weights_of(6, (96, 64), format, 1), weights_of(6, (64, 48), format, 8)
    with table(f"{variant}-2") as k:
        router, module = (
            router_of(k, random(6, 64, seed=1), RoutingRule(3, is_normalized=True)),
            experts_of(k, *weights, format),
        )
        assert_row_alone(lambda x: k.experts(x, k.route(None, x, router), module, "silu", x), random(NUM_ROWS, 64), k.row_tile)


def test_reference_row_is_independent_of_others() -> None:
    with table("reference") as k:
        router = router_of(k, random(6, 64, seed=1), RoutingRule(3, is_normalized=True))
        module = experts_of(k, weights_of(6, (96, 64), FLOAT32, 1), weights_of(6, (64, 48), FLOAT32, 8))
        assert_row_alone(lambda x: k.experts(x, k.route(None, x, router), module, "silu", x), random(NUM_ROWS, 64), k.row_tile)


@pytest.mark.parametrize("num_rows", [16, 96])
@pytest.mark.parametrize("columns", [(), ((64, 80),)], ids=["whole", "cut"])
def test_reference_without_host_reads_is_equal(
    num_rows: int, columns: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, all routings at once, a few, and one by one; some rows have no expert. Each rank computes its columns of
    each."""
    k, num_experts, hidden, inner = reference.TABLE, 12, 100, 37
    module = Experts(
        "experts",
        tuple(Linear((str(index),), hidden, (2 * inner,)) for index in range(num_experts)),
        tuple(Linear((str(index),), inner, (hidden,), columns=columns) for index in range(num_experts)),
    )
    parts = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    pack(k, module, **{f"{part}.{index}": random(*parts[part], seed=index) for part in parts for index in range(num_experts)})
    routing = k.route(None, paddle.to_tensor(random(num_rows, hidden)), router_of(k, random(12, hidden), RoutingRule(3)))
    ids = routing.ids.numpy().copy()
    ids[3:7] = -1
    weights = np.where(ids < 0, np.float32(0), routing.weights.numpy())
    given = paddle.to_tensor(random(num_rows, hidden, seed=1)), routing_of(ids, weights), module, "silu"
    expected = k.experts(*given, None).numpy()
    assert expected.shape[1] == (columns[0][1] - columns[0][0] if columns else hidden)
    for num_at_once in (1 << 20, 5, 1):
        monkeypatch.setattr("ops.paddle.reference.expert_ops.MAX_GATHERED", num_at_once * 2 * 64 * 112)
        np.testing.assert_array_equal(k.sync_free().experts(*given, None).numpy(), expected)


@pytest.mark.parametrize("format", [FLOAT32, WeightFormat("int8")], ids=named)
def test_nan_and_infinity_stay_in_their_row(format: WeightFormat) -> None:
    k = native.TABLE
    module = experts_of(k, weights_of(4, (32, 64), format, 1), weights_of(4, (64, 16), format, 8), format)
    x = random(20, 64)
    routing = routing_of(np.arange(40).reshape(20, 2) % 4, np.ones((20, 2), np.float32))
    before = k.experts(x, routing, module, "silu", None).numpy().copy()
    x[4], x[7, 3] = np.nan, np.inf
    after = k.experts(x, routing, module, "silu", None).numpy()
    others = np.delete(np.arange(20), [4, 7])
    np.testing.assert_array_equal(after[others], before[others])
    assert np.isnan(after[[4, 7]]).all()


def test_more_rows_than_one_wave() -> None:
    """Experts run in waves, each with some experts complete."""
    k = native.TABLE
    for num_experts in (7, 60):  # one or a few in a wave
        gate_up, down = weights_of(num_experts, (32, 16), FLOAT32, 1), weights_of(num_experts, (16, 16), FLOAT32, 8)
        module = experts_of(k, gate_up, down)
        x, ids = random(1500, 16), np.arange(4500).reshape(1500, 3) % num_experts
        weights = random(1500, 3, seed=3)
        found = k.experts(x, routing_of(ids, weights), module, "silu", None).numpy()
        np.testing.assert_allclose(found[::50], expected_of(x[::50], ids[::50], weights[::50], gate_up, down), atol=1e-5)


PANELS = 3 * 6  # of three experts


class _PartsAsked(Memory):
    """Recorder of the parts of each array that an op says it reads."""

    def __init__(self) -> None:
        self.parts: dict[str, list[tuple[int, int]]] = {}

    def keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fills, parts: Parts = ()) -> np.ndarray:
        self.parts[name] = [(begin * PANELS // shape[0], end * PANELS // shape[0]) for begin, end in parts]
        return super().keep(name, shape, dtype, fill, parts)


@pytest.mark.parametrize("format", [FLOAT32, WeightFormat("int8")], ids=named)
def test_share_of_experts_reads_its_panels(format: WeightFormat) -> None:
    columns = ((32, 48), (80, 96))
    gate_up = [Linear((str(index),), 16, (48, 48), format=format, columns=columns) for index in range(3)]
    down = [Linear((str(index),), 48, (96,), format=format, columns=((64, 96),)) for index in range(3)]
    sources = {f"gate_up.{index}": lambda: random(96, 16) for index in range(3)}
    sources |= {f"down.{index}": lambda: random(96, 48) for index in range(3)}
    store = _PartsAsked()
    native.TABLE.pack(Experts("e", tuple(gate_up), tuple(down)), sources, store)
    for name, parts in store.parts.items():
        of_each = [(2, 3), (5, 6)] if "gate_up" in name else [(4, 6)]
        assert parts == [(6 * index + begin, 6 * index + end) for index in range(3) for begin, end in of_each], name


def test_tape_follows_rows_and_expert_slots() -> None:
    """The addresses of an expert's matrices are read when the tape runs: they can move without recording it again. A profile
    covers the experts that were routed to."""
    counts = np.array([9], np.int32)
    gate_up, down = weights_of(5, (32, 16), FLOAT32, 1), weights_of(5, (16, 16), FLOAT32, 8)
    recording = Recording()
    k = make_table(recording)
    router, module = router_of(k, random(5, 16, seed=1), RoutingRule(1)), experts_of(k, gate_up, down)
    x = recording.allocate(recording.rows(counts, 0, 40), 16)
    y = k.experts(x, k.route(None, x, router), module, "silu", None)
    tape = recording.finish(y)
    assert x.owner is not None
    values = random(40, 16)
    x.owner[: values.size] = values.reshape(-1)
    for rows in (9, 40):
        counts[0] = rows
        tape.replay()
        routing = native.TABLE.route(None, values[:rows], router)
        expected = native.TABLE.experts(values[:rows], routing, module, "silu", None).numpy()
        np.testing.assert_array_equal(y.numpy(), expected)
        work = tape.profile()[-1].work
        num_met = len(np.unique(routing.ids.numpy()))
        assert work.num_bytes == 4 * (num_met * 3 * 16 * 16 + rows * (16 + 16 + 2))
        assert work.num_operations == 2 * rows * 3 * 16 * 16
        assert tape.profile()[-1].title == "experts experts"
    moved = experts_of(k, gate_up[::-1], down[::-1])
    for part in ("gate_up", "down"):
        to, moving = (getattr(each.weight, part).values.owner for each in (module, moved))
        to[:] = moving
    module.weight.slots.owner[:] = module.weight.slots.owner[::-1].copy()
    tape.replay()
    np.testing.assert_array_equal(y.numpy(), expected)


def test_one_choice_has_the_weight_one(k: OpTable) -> None:
    ids, weights = np.arange(48).reshape(16, 3) % 7, random(16, 3)
    for index in range(3):
        routing, factors = k.choose(routing_of(ids, weights), index)
        np.testing.assert_array_equal(routing.ids.numpy().reshape(-1), ids[:, index])
        np.testing.assert_array_equal(routing.weights.numpy(), np.ones((16, 1)))
        np.testing.assert_array_equal(factors.numpy(), weights[:, index : index + 1])
