"""Ops of several ranks: their exchanges, for matrices shared within a replica and experts shared by all replicas. Local
computation is done by the reference table, or another table over Paddle's tensors (`RankGroupOps.over`).

Tensors go through Paddle process groups, metadata through host memory. Sums never span ranks: columns are concatenated, and the
rank that has a row adds its experts' results in the row's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import paddle
from msgspec.structs import replace

from ops.modules import Experts, KvCache
from ops.paddle import reference
from ops.paddle.reference import Cut, own_columns
from ops.table import ROW_TILE, AttentionMetadata, Inputs, OpTable, Routing


class Group(Protocol):
    """Ranks that make the same calls in the same order; `place` is that of this rank."""

    place: int
    count: int

    def gather_values(self, values: np.ndarray) -> np.ndarray:
        """Gather [...] of each rank -> [count, ...], in their order."""

    def all_gather(self, x: paddle.Tensor) -> paddle.Tensor:
        """Gather float32 [n, m] of each rank -> [count, n, m]."""


class ExpertOps(NamedTuple):
    """Expert ops of a single rank."""

    experts: Callable[..., paddle.Tensor | Cut]  # as `OpTable.experts`, also for a rank with some columns of each expert
    sync_free_ops: Callable[..., paddle.Tensor | Cut]  # the same, without reading numbers on the host
    products: Callable[..., paddle.Tensor]  # as `reference.expert_products`
    combine: Callable[..., paddle.Tensor]  # as `reference.add_choices`
    # rows, ids, module, activation, consecutive experts -> [R * chosen, hidden], undefined for choices of other experts,
    # without reading on the host. None: other choices would cost as much, so each rank computes its own rows with all experts
    chosen_of_some: Callable[..., paddle.Tensor] | None = None


class RankGroupOps:
    """Ops of one rank. `tensor`: the ranks that share rows and matrices; None: a single rank. `sharing`: the ranks that share
    experts, replica by replica; None: no sharing."""

    def __init__(self, tensor: Group | None, sharing: Group | None) -> None:
        self._tensor = tensor
        self._sharing = sharing
        self._rows: AttentionMetadata | None = None  # of the current step

    def table(self) -> OpTable:
        """Return the table over reference ops."""
        of_reference = ExpertOps(
            self.experts_of_reference,
            self.sync_free_experts_of_reference,
            reference.expert_products,
            reference.add_choices,
        )
        return self.over(reference.TABLE, of_reference)

    def over(self, table: OpTable, experts: ExpertOps) -> OpTable:
        """Return `table` with gathered columns, and with shared experts if ranks share them."""

        def begin(inputs: Inputs, cache: KvCache) -> Any:
            self._rows = inputs
            return table.begin(inputs, cache)

        def keep_rows(step: Any, *tensors: paddle.Tensor) -> tuple[Any, ...]:
            kept: tuple[Any, ...] = table.keep_rows(step, *tensors)
            self._rows = kept[0].inputs
            return kept

        def of_experts(
            shared_results: Callable[..., paddle.Tensor], own: Callable[..., Any], part: Callable[..., Any] | None
        ) -> Callable[..., Any]:
            def run(
                x: paddle.Tensor,
                routing: Routing,
                module: Experts,
                activation: str,
                shared: paddle.Tensor | Cut | None = None,
            ) -> paddle.Tensor | Cut:
                others = None if shared is None else own_columns(shared)
                if self._sharing is not None and module.owners is not None and part is not None:
                    return experts.combine(shared_results(x, routing, module, activation, part), routing, others)
                found: paddle.Tensor | Cut = own(x, routing, module, activation, others)
                return found

            return run

        run_experts = of_experts(self._shared_results, experts.experts, experts.products)
        sync_free_experts = of_experts(self._shared_results_of_all, experts.sync_free_ops, experts.chosen_of_some)
        ops = {"begin": begin, "keep_rows": keep_rows, "all_gather": self.all_gather, "experts": run_experts}
        return replace(table, **ops, sync_free_ops={"experts": sync_free_experts})

    def all_gather(self, x: paddle.Tensor | Cut) -> paddle.Tensor:
        if not isinstance(x, Cut):
            return x
        assert self._tensor is not None, f"columns from {x.begin} of {x.width}, but there is no rank group for the others"
        widths = self._tensor.gather_values(np.array([x.begin, x.tensor.shape[1]]))[:, 1]
        parts = self._tensor.all_gather(_widened(x.tensor, int(widths.max())))
        return paddle.concat([part[:, :width] for part, width in zip(parts, widths.tolist(), strict=True)], axis=1)

    def experts_of_reference(
        self, x: paddle.Tensor, routing: Routing, module: Experts, activation: str, shared: paddle.Tensor | None = None
    ) -> paddle.Tensor | Cut:
        """Compute `reference.experts` on a rank that has some columns of each expert."""
        if not module.is_cut:
            return reference.experts(x, routing, module, activation, shared)
        ids = routing.ids.numpy().reshape(-1)
        choices, ((begin, _),), slots = np.arange(len(ids)), module.down[0].columns, reference.slots_of_choices(routing, module)
        gate_up = reference.expert_products(x, choices // routing.ids.shape[1], ids, module, "gate_up", slots)
        activated = self.activated(gate_up, module, activation)
        results = reference.expert_products(activated, choices, ids, module, "down", slots)
        return Cut(reference.add_choices(results, routing, shared), begin, module.num_inputs)

    def sync_free_experts_of_reference(
        self, x: paddle.Tensor, routing: Routing, module: Experts, activation: str, shared: paddle.Tensor | None = None
    ) -> paddle.Tensor | Cut:
        """Compute `reference.sync_free_experts` on a rank that has some columns of each expert."""
        if not module.is_cut:
            return reference.sync_free_experts(x, routing, module, activation, shared)
        ids, ((begin, _),) = paddle.clip(routing.ids, min=0).flatten(), module.down[0].columns
        gate_up = reference.sync_free_products(reference.rows_of_choices(x, routing), ids, module, "gate_up")
        results = reference.sync_free_products(self.activated(gate_up, module, activation), ids, module, "down")
        return Cut(reference.add_choices(results, routing, shared), begin, module.num_inputs)

    def activated(self, gate_up: paddle.Tensor, module: Experts, activation: str) -> paddle.Tensor:
        """Return all columns of the input of `down`, from this rank's columns of gate and up."""
        first = module.gate_up[0].columns[0][0]
        return self.all_gather(reference.activate_and_multiply(Cut(gate_up, first, 2 * module.inner), activation, module.clamp))

    def _shared_results(
        self, x: paddle.Tensor, routing: Routing, module: Experts, activation: str, products: Callable[..., paddle.Tensor]
    ) -> paddle.Tensor:
        """Return the results of each row's choices, [R * chosen, hidden]; those of padded rows are undefined. Tensor ranks have
        the same rows: each sends its part of them, computes the choices assigned to it, and all exchange their results."""
        sharing, num_same = cast(Group, self._sharing), 1 if self._tensor is None else self._tensor.count
        num_rows, place = cast(AttentionMetadata, self._rows).num_tokens, sharing.place % num_same
        own = slice(num_rows * place // num_same, num_rows * (place + 1) // num_same)
        shown = routing.ids.numpy()[own]
        if module.counts is not None:
            np.add.at(module.counts, shown[shown >= 0], 1)
        num_shown = sharing.gather_values(np.array([len(shown)]))[:, 0]
        most = int(num_shown.max())
        if most == 0:
            return paddle.zeros([x.shape[0] * shown.shape[1], module.num_inputs])
        ids = sharing.gather_values(np.resize(shown, (most, shown.shape[1])))  # rows beyond the valid ones are unused
        rows = sharing.all_gather(_with_rows(x[own] if len(shown) else None, most, module.num_inputs)).flatten(0, 1)
        choices, slots = _Choices.of(ids, num_shown, module.owners), None
        if module.adapters is not None:
            of_own = routing.adapter_slots[: routing.ids.shape[0]].numpy()[own]
            slots = sharing.gather_values(np.resize(of_own, most)).reshape(-1)[choices.rows]
        results = sharing.all_gather(self._computed(rows, choices, module, activation, products, slots)).flatten(0, 1)
        first = sharing.place - place
        wanted = choices.places[(choices.homes >= first) & (choices.homes < first + num_same)]
        return paddle.gather(results, paddle.to_tensor(np.resize(wanted, x.shape[0] * shown.shape[1])))

    def _shared_results_of_all(
        self,
        x: paddle.Tensor,
        routing: Routing,
        module: Experts,
        activation: str,
        chosen_of_some: Callable[..., paddle.Tensor],
    ) -> paddle.Tensor:
        """Return `_shared_results` without reading on the host which experts rows have, with the same number of rows on every
        rank: each rank computes the choices of all ranks for a range of experts, equally many on each rank except the last,
        regardless of `owners`. No rows are counted for the balancer."""
        sharing, num_same = cast(Group, self._sharing), 1 if self._tensor is None else self._tensor.count
        (num_rows, num_chosen), place = routing.ids.shape, sharing.place % num_same
        num_shown = -(-num_rows // num_same)  # part of the rows shared by tensor ranks; the last part is padded with zeros
        own = slice(num_shown * place, min(num_shown * (place + 1), num_rows))
        shown = paddle.concat([x[own], routing.ids[own].astype("float32")], axis=1)
        of_all = sharing.all_gather(_with_rows(shown, num_shown, shown.shape[1])).flatten(0, 1)
        of_all = _with_rows(of_all, -(-of_all.shape[0] // ROW_TILE) * ROW_TILE, of_all.shape[1])
        rows, ids = of_all[:, : x.shape[1]].contiguous(), of_all[:, x.shape[1] :].astype("int32")
        num_each = -(-module.num_experts // sharing.count)
        own_experts = range(module.num_experts)[num_each * sharing.place : num_each * (sharing.place + 1)]
        if own_experts:
            results = chosen_of_some(rows, ids, module, activation, own_experts)
        else:
            results = paddle.zeros([rows.shape[0] * num_chosen, module.num_inputs])
        results = sharing.all_gather(results).flatten(0, 1)
        first = (sharing.place - place) * num_shown * num_chosen
        places = first + paddle.arange(num_rows * num_chosen, dtype="int32")
        owners = (paddle.clip(routing.ids, min=0) // num_each).flatten()
        return paddle.gather(results, owners * (rows.shape[0] * num_chosen) + places)

    def _computed(
        self,
        rows: paddle.Tensor,
        choices: _Choices,
        module: Experts,
        activation: str,
        products: Callable[..., paddle.Tensor],
        slots: np.ndarray | None,
    ) -> paddle.Tensor:
        """Return [most, hidden]: results of the choices assigned to this rank, in the common order; the rest is undefined.
        `slots`: the adapter of each choice, if the experts have adapters."""
        own = np.flatnonzero(choices.computing == cast(Group, self._sharing).place)
        if not len(own):
            return paddle.zeros([choices.most, module.num_inputs])
        own = np.resize(own, choices.most)
        ids, more = choices.ids[own], () if slots is None else (slots[own],)
        gate_up = products(rows, choices.rows[own], ids, module, "gate_up", *more)
        activated = own_columns(reference.activate_and_multiply(gate_up, activation, module.clamp))
        return products(activated, np.arange(choices.most), ids, module, "down", *more)


@dataclass(frozen=True, slots=True)
class _Choices:
    """All choices of all rows that ranks send, in a common order: int [n] each."""

    homes: np.ndarray  # the rank that sends the row
    rows: np.ndarray  # index of the row among all sent rows
    ids: np.ndarray  # the expert
    computing: np.ndarray  # the rank that computes it
    places: np.ndarray  # index of its result, with `most` from each rank
    most: int  # whole tiles

    @staticmethod
    def of(ids: np.ndarray, num_shown: np.ndarray, owners: np.ndarray) -> _Choices:
        """Gather the choices of all ranks. `ids` [ranks, most rows, chosen]; each rank has `num_shown` valid ones."""
        num_ranks, most_rows, _ = ids.shape
        homes, rows, choices = np.nonzero(np.broadcast_to(np.arange(most_rows)[:, None] < num_shown[:, None, None], ids.shape))
        experts = ids[homes, rows, choices]
        computing = owners[experts, 1 + (homes + rows) % owners[experts, 0]]  # engine/parallel/placement.py
        of_each = np.bincount(computing, minlength=num_ranks)
        most = -(-int(of_each.max()) // ROW_TILE) * ROW_TILE
        places = np.empty(len(experts), np.int64)
        places[np.argsort(computing, kind="stable")] = np.concatenate(
            [rank * most + np.arange(count) for rank, count in enumerate(of_each.tolist())]
        )
        return _Choices(homes, homes * most_rows + rows, experts, computing, places, most)


def _widened(x: paddle.Tensor, width: int) -> paddle.Tensor:
    missing = width - x.shape[1]
    return paddle.concat([x, paddle.zeros([x.shape[0], missing])], axis=1) if missing else x


def _with_rows(x: paddle.Tensor | None, count: int, width: int) -> paddle.Tensor:
    """Return x [n, width], which may have no rows, padded with rows of zeros."""
    missing = count - (0 if x is None else x.shape[0])
    return paddle.concat([*([] if x is None else [x]), *([paddle.zeros([missing, width])] if missing else [])])
