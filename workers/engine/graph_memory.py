"""Memory that a graph reads and writes: before each replay, its addresses are compared with those at capture. Used by the plans
with graphs (`graph_plan.py`, `draft_plan.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ops.modules import Tensor
from workers.devices.capabilities import DeviceError
from workers.devices.device import Device
from workers.engine.row_inputs import AttentionMetadata


class Place(NamedTuple):
    """Attribute or item that holds a tensor."""

    name: str
    owner: Any
    key: Any

    @property
    def tensor(self) -> Tensor:
        """Return the present tensor."""
        return self.owner[self.key] if isinstance(self.owner, dict | list | tuple) else getattr(self.owner, self.key)


class GraphMemory:
    """Tensors of `inputs`, by prefix of their names, and of `parts`, the named owners of further tensors."""

    def __init__(self, device: Device, inputs: Mapping[str, AttentionMetadata], **parts: object) -> None:
        self._device, self._inputs = device, inputs
        seen: set[int] = set()
        self._places = [place for name, part in parts.items() for place in places_of(part, name, seen)]

    def addresses(self) -> tuple[int, ...]:
        return tuple(self._device.address(tensor) for _, tensor in self._tensors())

    def check(self, what: str, captured: tuple[int, ...]) -> None:
        """Raise DeviceError if an address has changed since `what` was captured, because the graph would use wrong memory."""
        now = self.addresses()
        if now == captured:
            return
        moved = [
            f"{name} at {there:#x}, now at {here:#x}"
            for (name, _), there, here in zip(self._tensors(), captured, now, strict=True)
            if there != here
        ]
        raise DeviceError(f"graphs captured for {what} read moved memory: {'; '.join(moved[:4])}; reload the weights")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, inputs in self._inputs.items():
            yield from ((f"{prefix}{name}", tensor) for name, tensor in inputs.tensors())
        yield from ((place.name, place.tensor) for place in self._places)


def places_of(part: Any, name: str, seen: set[int]) -> Iterator[Place]:
    """Yield where modules, lists and tables hold tensors, except those already `seen`."""
    if id(part) in seen:
        return
    seen.add(id(part))
    found: Iterable[tuple[Any, Any]]
    if isinstance(part, dict):
        found = part.items()
    elif isinstance(part, list | tuple):
        found = enumerate(part)
    else:
        of_type = (*getattr(part, "__struct_fields__", ()), *getattr(part, "__dataclass_fields__", ()))
        found = [(field, getattr(part, field)) for field in (*of_type, *getattr(part, "__dict__", ()))]
    for key, value in found:
        if hasattr(value, "data_ptr"):
            yield Place(f"{name}.{key}", part, key)
        else:
            yield from places_of(value, f"{name}.{key}", seen)
