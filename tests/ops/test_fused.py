"""Selection of fused ops: the correct ones, with bits that depend on the row alone. On Paddle's CPU place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from msgspec.structs import replace

from engine.metric_labels import OP_CANDIDATES
from ops.modules import Linear, Norm, Rotary
from ops.paddle import choice, fused
from ops.paddle.fused import CANDIDATES, Candidate
from ops.paddle.reference import TABLE
from ops.table import DeviceSampler, OpTable
from workers.devices.paddle import PaddleDevice

LINEAR = Linear(("w",), 64, (96,), has_bias=True)


def with_linear(name: str, change: Callable[[paddle.Tensor], paddle.Tensor]) -> Candidate:
    """Return a candidate with the reference's linear, changed."""

    def changed(table: OpTable) -> OpTable:
        return replace(table, linear=lambda x, module: change(TABLE.linear(x, module)))

    return Candidate(name, changed)


def fails(y: paddle.Tensor) -> paddle.Tensor:
    raise RuntimeError("NotFoundError: it has no kernel\n  [Hint: look elsewhere]")


WRONG = with_linear("wrong", lambda y: y * 1.001)
VARIANT = with_linear("variant", lambda y: y + 1e-7 * y.shape[0])
PLACED = with_linear("placed", lambda y: y + 1e-6 * paddle.arange(y.shape[0], dtype="float32").unsqueeze(1) % 2)
FAILING = with_linear("failing", fails)
GOOD = with_linear("good", lambda y: y)


def test_candidates_are_counted_by_name() -> None:
    assert {op: tuple(each.name for each in found) for op, found in CANDIDATES.items()} == OP_CANDIDATES


def test_ops_taken_on_the_cpu_place() -> None:
    """Paddle 3.3.1 has no CPU kernel of one of them. The results of the others depend on the processor: each is the first of
    its op that was not rejected."""
    PaddleDevice("cpu")
    places = np.arange(48)
    tables = np.cos(np.outer(places, np.linspace(1, 0.1, 16))).astype(np.float32), np.zeros((48, 16), np.float32)
    cases = [
        choice.linear_case(LINEAR),
        choice.norm_case(Norm("n", 64, 1e-6)),
        choice.activation_case("silu", 40),
        choice.rotary_case(Rotary(16), *tables, np.arange(16) ^ 1),
        choice.draw_case(300),
    ]
    found = choice.choose(TABLE, cases)
    left = {(each.op, each.candidate): each.reason for each in found.fallbacks}
    assert left["rotary", "fused_rotary_position_embedding"].startswith("heads of 16: it fails: ")
    firsts = {op: next(each.name for each in of_op if (op, each.name) not in left) for op, of_op in CANDIDATES.items()}
    assert found.taken == firsts


def choose(monkeypatch: pytest.MonkeyPatch, *candidates: Candidate, module: Linear = LINEAR, **options: Any) -> choice.Choice:
    monkeypatch.setitem(CANDIDATES, "linear", candidates)
    return choice.choose(TABLE, [choice.linear_case(module)], **options)


def test_the_first_that_is_right_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose(monkeypatch, WRONG, FAILING, VARIANT, PLACED, GOOD, VARIANT)
    assert found.taken == {"linear": "good"}
    reasons = {each.candidate: (each.reason, each.is_variant) for each in found.fallbacks}
    assert list(reasons) == ["wrong", "failing", "variant", "placed"]
    assert "64 inputs, 96 outputs: error " in reasons["wrong"][0]
    assert reasons["failing"] == ("64 inputs, 96 outputs: it fails: NotFoundError: it has no kernel", False)
    assert reasons["variant"] == ("64 inputs, 96 outputs: rows have different bits in a batch of 16", True)
    assert reasons["placed"][1]


def test_no_candidate_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are correct except for their last bits can be allowed, others cannot."""
    with pytest.raises(choice.NoCandidateError, match=r"^wrong: 64 inputs, .*; variant: .* different bits in a batch of 16$"):
        choose(monkeypatch, WRONG, VARIANT)
    assert choose(monkeypatch, WRONG, VARIANT, allows_variant=True).taken == {"linear": "variant"}
    with pytest.raises(choice.NoCandidateError, match="it has no kernel"):
        choose(monkeypatch, WRONG, FAILING, allows_variant=True)


def test_wrong_device_sampler_is_replaced_by_the_host() -> None:
    """The sampler takes the last one of equal logits."""

    def last(inputs: Any, logits: paddle.Tensor) -> paddle.Tensor:
        assert TABLE.drawing is not None
        return logits.shape[1] - 1 - TABLE.drawing.run(inputs, paddle.flip(logits, [1]))

    table = replace(TABLE, drawing=DeviceSampler(last, is_greedy=True))
    found = choice.choose(table, [choice.draw_case(300)])
    assert (found.taken, found.ops.drawing) == ({"draw": "host"}, None)
    assert choice.choose(TABLE, [choice.draw_case(300)]).ops.drawing is TABLE.drawing


def test_columns_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Linear(("w",), 64, (96,), has_bias=True, columns=((16, 48), (80, 96)))
    other = with_linear("by width", lambda y: y)

    def by_width(x: paddle.Tensor, module: Linear) -> Any:
        y = TABLE.linear(x, module)
        return replace_tensor(y) if module.columns else y

    def replace_tensor(y: Any) -> Any:
        return type(y)(y.tensor + 1e-6, y.begin, y.width)

    other = Candidate("by width", lambda table: replace(table, linear=by_width))
    found = choose(monkeypatch, other, *CANDIDATES["linear"], module=part)
    assert found.taken["linear"] in OP_CANDIDATES["linear"]
    assert found.fallbacks[0].reason.endswith("columns of a rank have different bits than the whole")


@pytest.mark.parametrize("are_neighbours", [False, True])
def test_rotation_as_paddle_documents_it(monkeypatch: pytest.MonkeyPatch, are_neighbours: bool) -> None:
    """The op has no CPU kernel: an implementation of its documentation replaces it and confirms the meaning of the angles."""

    def documented(q: paddle.Tensor, *, sin: paddle.Tensor, cos: paddle.Tensor, use_neox_rotary_style: bool) -> Any:
        if use_neox_rotary_style:
            pairs = q.reshape([*q.shape[:-1], -1, 2])
            turned = paddle.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(q.shape)
        else:
            first, second = paddle.split(q, 2, axis=-1)
            turned = paddle.concat([-second, first], axis=-1)
        return q * cos + turned * sin, None, None

    monkeypatch.setattr(fused.fused, "fused_rotary_position_embedding", documented)
    places, angles = np.arange(16), np.outer(np.arange(48), np.linspace(1, 0.1, 8))
    partners = places ^ 1 if are_neighbours else (places + 8) % 16
    signs = np.where(places < partners, -1, 1)
    both = [np.repeat(each(angles), 2, axis=1) if are_neighbours else np.tile(each(angles), 2) for each in (np.cos, np.sin)]
    case = choice.rotary_case(Rotary(16), both[0].astype(np.float32), (both[1] * signs).astype(np.float32), partners)
    found = choice.choose(TABLE, [case])
    assert (found.taken, found.fallbacks) == ({"rotary": "fused_rotary_position_embedding"}, [])
    cosines, sines = (each.astype(np.float32) for each in both)
    half = choice.rotary_case(Rotary(16), cosines, sines, np.append(places[:8] ^ 1, places[8:]))
    assert choice.choose(TABLE, [half]).fallbacks == [], "others are left to the table, within the candidate"
