"""Routing, and experts in order of rows or without a look at the routing."""

from __future__ import annotations

import math

import numpy as np
import paddle
from paddle.nn import functional

from ops.modules import Experts, Router, RoutingRule
from ops.paddle.reference.chunks import OUTPUT_CHUNK, Cut, columns_of, expand, own_columns, product, whole_lines, width_of
from ops.paddle.reference.linears import activate, activate_and_multiply, adapt, add_adapted, linear
from ops.paddle.reference.sampling import largest_of
from ops.paddle.reference.step import AttentionStep
from ops.table import ROW_TILE, Routing

MAX_GATHERED = 1 << 24  # elements of gathered expert weights (64 MiB), but at least one choice


def route(step: AttentionStep, x: paddle.Tensor, module: Router) -> Routing:
    logits, rule = linear(x, module.linear), module.rule
    if module.linear.adapters is not None:
        logits = adapt(step, logits, x, module.linear)
    logits = own_columns(logits)
    if rule.scoring == "softmax":
        weights = paddle.exp(logits - expand(paddle.max(logits, axis=-1, keepdim=True), logits.shape))
        scores = weights / expand(paddle.sum(weights, axis=-1, keepdim=True), logits.shape)
    else:
        scores = functional.sigmoid(logits)
    left = scores if module.correction is None else scores + expand(module.correction, scores.shape)
    ids = largest_of(_in_best_groups(left, rule), rule.num_chosen)
    chosen = paddle.take_along_axis(scores, ids, axis=1)
    if rule.is_normalized:
        total = paddle.add_n(paddle.unbind(chosen, axis=1)).unsqueeze(1) + rule.added_to_sum
        chosen = chosen / expand(paddle.clip(total, min=rule.smallest_sum), chosen.shape)
    weights = chosen * rule.factor
    if module.scales is not None:
        weights = weights * paddle.gather(module.scales, ids.flatten()).reshape(weights.shape)
    adapter_slots = getattr(getattr(step, "inputs", None), "adapter_slots", None)
    if module.set is None:
        return Routing(ids, weights, adapter_slots)
    is_own = expand((step.inputs.expert_sets[: x.shape[0]] == module.set).unsqueeze(-1), ids.shape)
    return Routing(
        paddle.where(is_own, ids, paddle.full_like(ids, -1)),
        paddle.where(is_own, weights, paddle.zeros_like(weights)),
        adapter_slots,
    )


def _in_best_groups(scores: paddle.Tensor, rule: RoutingRule) -> paddle.Tensor:
    """Return the scores, -inf for experts of other groups."""
    if rule.num_groups == 1:
        return scores
    rows, size = scores.shape[0], scores.shape[1] // rule.num_groups
    grouped = scores.reshape([rows, rule.num_groups, size])
    best = largest_of(paddle.topk(grouped, min(rule.num_best, size))[0].sum(axis=-1), rule.num_chosen_groups)
    groups = paddle.arange(rule.num_groups, dtype="int32").reshape([1, 1, -1]) == best.unsqueeze(-1)
    is_kept = expand(paddle.any(groups, axis=1).unsqueeze(-1), grouped.shape)
    return paddle.where(is_kept, grouped, paddle.full_like(grouped, -math.inf)).reshape(scores.shape)


def choose(routing: Routing, index: int) -> tuple[Routing, paddle.Tensor]:
    ids, factors = (each[:, index : index + 1].contiguous() for each in (routing.ids, routing.weights))
    return Routing(ids, paddle.ones_like(factors), routing.adapter_slots), factors


def experts(
    x: paddle.Tensor, routing: Routing, module: Experts, activation: str, shared: paddle.Tensor | None = None
) -> paddle.Tensor:
    ids = routing.ids.numpy().reshape(-1)
    choices, slots = np.arange(len(ids)), slots_of_choices(routing, module)
    gate_up = expert_products(x, choices // routing.ids.shape[1], ids, module, "gate_up", slots)
    activated = own_columns(activated_of(gate_up, activation, module))
    return add_choices(expert_products(activated, choices, ids, module, "down", slots), routing, shared)


def activated_of(gate_up: paddle.Tensor | Cut, activation: str, module: Experts) -> paddle.Tensor | Cut:
    """Return the input of the experts' second linear."""
    return activate_and_multiply(gate_up, activation, module.clamp) if module.is_gated else activate(gate_up, activation)


def slots_of_choices(routing: Routing, module: Experts) -> np.ndarray | None:
    """Return the adapter slot of each choice; None: the experts have no adapters."""
    rows, num_chosen = routing.ids.shape
    return None if module.adapters is None else routing.adapter_slots[:rows].numpy().repeat(num_chosen)


def expert_products(
    x: paddle.Tensor, rows: np.ndarray, ids: np.ndarray, module: Experts, part: str, slots: np.ndarray | None = None
) -> paddle.Tensor:
    """Return [n, out]: row rows[i] of x times the weights of a part of expert ids[i], plus its bias and the term of the adapter
    in slots[i]. Computed expert by expert, with rows padded to whole tiles by copies of the first. Expert -1 means none and
    gives zeros."""
    experts, biases, linears = getattr(module.weight, part), getattr(module.weight, f"{part}_bias"), module.parts[part]
    results = paddle.zeros([len(ids), width_of(experts.own)])
    for expert in np.unique(ids[ids >= 0]).tolist():
        own = np.flatnonzero(ids == expert)
        places = np.append(own, np.repeat(own[:1], -len(own) % ROW_TILE))
        own_x = paddle.gather(x, paddle.to_tensor(rows[places]))
        products = product(own_x, experts.each[expert])
        products = products if biases is None else products + biases[expert]
        if slots is not None and module.adapters is not None:
            products = add_adapted(products, own_x, slots[places], module.adapters.of(part, expert), linears[expert].columns)
        paddle.scatter_(results, paddle.to_tensor(places), products)
    return results


def sync_free_experts(
    x: paddle.Tensor, routing: Routing, module: Experts, activation: str, shared: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Compute `experts` without reading on the host which experts rows have. The same bits, since a row's product does not
    depend on other rows."""
    ids = paddle.clip(routing.ids, min=0).flatten()
    gate_up = sync_free_products(rows_of_choices(x, routing), ids, module, "gate_up")
    activated = own_columns(activated_of(gate_up, activation, module))
    return add_choices(sync_free_products(activated, ids, module, "down"), routing, shared)


def rows_of_choices(x: paddle.Tensor, routing: Routing) -> paddle.Tensor:
    """Return [R * chosen, in] from rows [R, in]: the row of each choice."""
    rows, num_chosen = routing.ids.shape
    return expand(x.unsqueeze(1), [rows, num_chosen, x.shape[1]]).reshape([rows * num_chosen, x.shape[1]])


def sync_free_products(x: paddle.Tensor, ids: paddle.Tensor, module: Experts, part: str) -> paddle.Tensor:
    """Return [n, out]: row i of x [n, in] times the weights of a part of expert ids[i], plus its bias. Weights are read once
    per choice, while `expert_products` reads them once for all rows of the expert, but must read the choices on the host."""
    experts, biases = getattr(module.weight, part), getattr(module.weight, f"{part}_bias")
    num_chunks, width = experts.weights.shape[1], experts.weights.shape[3]
    num_each = max(1, MAX_GATHERED // (num_chunks * width * OUTPUT_CHUNK))
    x, outputs = whole_lines(x), []
    for begin in range(0, x.shape[0], num_each):
        end = min(begin + num_each, x.shape[0])
        in_chunks = [end - begin, num_chunks, 1, width]
        weights = paddle.gather(experts.weights, ids[begin:end]).reshape([*in_chunks[:2], width, OUTPUT_CHUNK])
        y = paddle.matmul(expand(x[begin:end].reshape([end - begin, 1, 1, width]), in_chunks), weights)
        outputs.append(y.reshape([end - begin, -1]))
    products = columns_of(outputs[0] if len(outputs) == 1 else paddle.concat(outputs), experts.own)
    return products if biases is None else products + paddle.gather(biases, ids)


def add_choices(results: paddle.Tensor, routing: Routing, shared: paddle.Tensor | None) -> paddle.Tensor:
    """Return [R, n]: the weighted results of each row's choices [R * chosen, n], added in order, and then the shared ones."""
    rows, num_chosen = routing.weights.shape
    shape = [rows, num_chosen, results.shape[1]]
    weighed = results.reshape(shape) * expand(routing.weights.unsqueeze(-1), shape)
    parts = paddle.unbind(weighed, axis=1)
    return paddle.add_n([*parts, *([] if shared is None else [shared])])
