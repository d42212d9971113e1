"""Pinned host memory as Paddle has it beside a card: an op that reads a pinned tensor first moves it to the card, in place
(`TransformData` in Paddle's `data_transform.cc`), so the host's array of its old address is no longer the tensor.

Paddle's builds for the CPU cannot pin. `offer_pinned_memory` gives them a `pin_memory` that behaves so, in this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import paddle

from tests.devices.build import NAME

CARD = paddle.CustomPlace(NAME, 0)
# what is no op: whole copies, and questions
_ALLOWED = frozenset({"copy_", "_copy_to", "data_ptr", "get_tensor", "pin_memory", "element_size", "dim", "numel"})
_OPS = frozenset({"__getitem__", "__setitem__"})


def offer_pinned_memory() -> None:
    """Let tensors of this process be pinned; once."""
    kind: Any = paddle.Tensor
    if kind.pin_memory is _pin:
        return
    kind.pin_memory = _pin
    for name in dir(kind):
        method = getattr(kind, name)
        if name not in _ALLOWED and callable(method) and (name in _OPS or not name.startswith("_")):
            setattr(kind, name, _moving(method))


def _pin(tensor: paddle.Tensor, blocking: bool = True) -> paddle.Tensor:
    found: Any = cast(Any, tensor)._copy_to(paddle.CPUPlace(), blocking)
    found.is_pinned_here = True
    return cast(paddle.Tensor, found)


def _moving(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def moved(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(tensor, "is_pinned_here", False):
            tensor.is_pinned_here = False
            on_card = tensor._copy_to(CARD, True)
            tensor.get_tensor()._share_data_with(on_card.get_tensor())
        return method(tensor, *arguments, **options)

    return moved
