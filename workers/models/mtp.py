"""Multi-token prediction (DeepSeek-AI 2024, section 2.2): a layer beside the trunk that drafts the tokens after the next one.

Declared with a model if its drafts are requested; run by `extensions/drafts/draft_plan.py`. From token j and the trunk's hidden
state before it, h_{j - 1}, a module computes a hidden state h'_j, from which a head drafts token j + 1:

    h'_j = layer(projection([embedding_norm(embedding of token j), hidden_norm(h_{j - 1})]))

The layer's attention has separate keys and values: the entry of position j, from 1 on, is made of token j and h_{j - 1}. The
next draft token is computed from the last one and h'_j in place of h_j, by the next module, or by the same if there is only
one.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.families.drafts import DraftNames
from ops.modules import KvCache, Linear, Tensor
from ops.table import Inputs, OpTable
from workers.models.llama import Llama
from workers.models.norms import BlockNorm, add_norm, declare_norm, normalize
from workers.weights.declaration import Weights

DENSE = -1  # like the trunk's last layer, but without experts


class DraftModule:
    """One MTP module."""

    def __init__(self, trunk: Llama, names: DraftNames, cache_index: int, parts: _Parts) -> None:
        """`cache_index`: of its layer in the cache, after those of the trunk."""
        self.cache_index = cache_index
        self._trunk = trunk
        self._is_fed_normalized = names.is_fed_normalized
        self.embedding_norm = parts.norm(names.embedding_norm)
        self.hidden_norm = parts.norm(names.hidden_norm)
        self.projection = parts.projection(names.projection)
        kind = trunk.config.num_layers - 1 if names.is_sparse else DENSE
        self.layer = trunk.layer_class(trunk.config, kind, parts.weights, names.layer)
        self.norm = parts.norm(names.norm)
        head = parts.head(names.head) if names.head else trunk.head
        assert head is not None, "the trunk has no head"
        self.head = head

    def parts(self) -> Sequence[object]:
        shared = self._trunk.embedding, self._trunk.rotary, self.head
        return *shared, self.embedding_norm, self.hidden_norm, self.projection, self.layer, self.norm

    def store(self, ops: OpTable, inputs: Inputs, hidden: Tensor, cache: KvCache) -> None:
        h, _ = self._enter(ops, inputs, hidden)
        angles = ops.rotary_angles(inputs, self._trunk.rotary)
        self.layer.store(ops, inputs, h, angles, cache.layers[self.cache_index])

    def forward(self, ops: OpTable, inputs: Inputs, hidden: Tensor, cache: KvCache) -> tuple[Tensor, Tensor]:
        step = ops.begin(inputs, cache)
        angles = ops.rotary_angles(inputs, self._trunk.rotary)
        layer_cache = cache.layers[self.cache_index]
        h, residual = self._enter(ops, inputs, hidden)
        h = self.layer.attend(ops, step, self.layer.store(ops, inputs, h, angles, layer_cache), layer_cache)
        h, residual = add_norm(ops, h, residual, self.layer.inner_norm)
        assert self.layer.mlp is not None, "the trunk's layers have no MLP"
        h = self.layer.mlp.forward(ops, step, h)
        h, residual = add_norm(ops, h, residual, self.norm)
        return h, h if self._is_fed_normalized else residual

    def logits(self, ops: OpTable, hidden: Tensor, row_ids: Tensor) -> Tensor:
        return ops.all_gather(ops.linear(ops.take_rows(hidden, row_ids), self.head))

    def _enter(self, ops: OpTable, inputs: Inputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projection's result, normalized for the layer and unchanged."""
        embedded = normalize(ops, ops.embedding(inputs, self._trunk.embedding), self.embedding_norm)
        of_token, of_hidden = self.projection
        parts = ops.linear(embedded, of_token), ops.linear(normalize(ops, hidden, self.hidden_norm), of_hidden)
        return add_norm(ops, *parts, self.layer.input_norm)


class _Parts:
    """Parts of the modules. Parts with the same name are shared."""

    def __init__(self, trunk: Llama, weights: Weights) -> None:
        self.weights = weights
        self._config = trunk.config
        self._norms: dict[str, BlockNorm] = {trunk.norm.name: trunk.norm}
        self._projections: dict[str, tuple[Linear, Linear]] = {}

    def norm(self, name: str) -> BlockNorm:
        if name not in self._norms:
            self._norms[name] = declare_norm(self._config, self.weights, name)
        return self._norms[name]

    def projection(self, name: str) -> tuple[Linear, Linear]:
        if name not in self._projections:
            self._projections[name] = self.weights.linear_parts(name, self._config.hidden_size, self._config.hidden_size)
        return self._projections[name]

    def head(self, name: str) -> Linear:
        return self.weights.linear([name], self._config.hidden_size, [self._config.vocab_size])


def declare_drafts(trunk: Llama, weights: Weights) -> list[DraftModule]:
    """Declare the modules that checkpoints of the family have beside `trunk`."""
    config = trunk.config
    names = FAMILIES[config.architecture].draft_names
    assert names is not None, f"{config.architecture} has no MTP layers"
    first, parts = config.num_layers, _Parts(trunk, weights)
    return [DraftModule(trunk, names.of(index, first), first + index, parts) for index in range(config.num_draft_layers)]
