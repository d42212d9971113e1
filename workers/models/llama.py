"""Llama (Touvron et al. 2023): the decoder that the other dense architectures vary.

Made by the loader, run by a plan. R is the padded number of rows of the step (`ops/table.py`). `ModelConfig` says which
projections have biases, the window and rotary variant of each layer, and which layers have experts; the family names the norms
of a layer and the projections that are stored as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from ops.modules import AttentionShape, HeadNorm, KvCache, LayerCache, Linear, Norm, Rotary, Tensor
from ops.table import Inputs, OpTable
from workers.encoders.tower import Tower
from workers.models.adapted import linear
from workers.models.mlp import FeedForward, feed_forward
from workers.models.norms import BlockNorm, BranchEnd, add_norm, declare_norm, normalize
from workers.rank_group.share import head_columns, query_columns
from workers.weights.declaration import Weights

CLASS_HEAD = "score"  # of classifiers


class Layer(Protocol):
    """A decoder layer, as `Llama.forward` calls it."""

    @property
    def mlp(self) -> FeedForward | None:
        """None: the layer ends with `attend`."""

    @property
    def input_norm(self) -> BlockNorm | None:
        """None: attention reads the residual as it is."""

    @property
    def inner_norm(self) -> BlockNorm | None:
        """None: the MLP reads the residual as it is."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        """Declare layer `index` of the trunk, stored under `prefix`."""

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: Any) -> tuple[Tensor, ...]:
        """Return the queries of all rows, and what else `attend` reads of each row; keys and values are written to the
        cache, a LayerCache. A recurrent layer has a RecurrentCache, and writes the states of the sequences to it."""

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: Any) -> Tensor:
        """Return the attention output for the rows of `step`, from those of `store`."""


class DraftLayer(Protocol):
    """A layer that drafts further tokens (`mtp.py`)."""

    def parts(self) -> Sequence[object]:
        """Return all modules whose weights it reads, including the trunk's."""

    def store(self, ops: OpTable, inputs: Inputs, hidden: Tensor, cache: KvCache) -> None:
        """Write entries of accepted tokens: those of `inputs`, with the trunk's `hidden` states before them [R, hidden].
        `begin` must have been called for them."""

    def forward(self, ops: OpTable, inputs: Inputs, hidden: Tensor, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Return the input of the head and of the next draft, [R, hidden] each, from the last token of each sequence and the
        `hidden` state before it. Its entry is written to the cache."""

    def logits(self, ops: OpTable, hidden: Tensor, row_ids: Tensor) -> Tensor:
        """Return logits (`Llama.logits`) from the head's input."""


class EndedFeedForward(FeedForward):
    """An MLP, or a mixture of experts, with the end of its branch."""

    def __init__(self, inner: FeedForward, end: BranchEnd) -> None:
        self.inner = inner
        self.end = end

    def forward(self, ops: OpTable, step: Any, h: Tensor) -> Tensor:
        return self.end.apply(ops, self.inner.forward(ops, step, h))


class LlamaLayer:
    """One decoder layer's weights."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> None:
        family = FAMILIES[config.architecture]

        def norm(name: str) -> BlockNorm | None:
            return declare_norm(config, weights, f"{prefix}.{name}") if name else None

        names, multipliers, factor = family.norm_names, config.multipliers, config.multipliers.residual
        num_heads, sizes = config.num_attention_heads, config.layer_shape(index)
        sinks = weights.attention_sinks(f"{prefix}.self_attn.sinks", num_heads) if family.has_sinks else None
        self.shape = weights.share.heads(
            AttentionShape(
                num_heads,
                sizes.num_kv_heads,
                sizes.head_dim,
                config.sliding_windows[index],
                (multipliers.scores or sizes.head_dim**-0.5) * multipliers.keys
                if multipliers.keys != 1.0
                else multipliers.scores,
                multipliers.softcap_of_scores,
                config.has_chunks,
                config.is_bidirectional,
                sinks=sinks,
                has_keys=sizes.source == index,
                has_bounds=index not in config.causal_layers,
            )
        )
        queries, keys = self.shape.queries_width, self.shape.keys_width
        self.input_norm = norm(names.input)
        parts, widths = ["q_proj", "k_proj", "v_proj" if sizes.has_value_weights else "k_proj"], [queries, keys, keys]
        if "qkv_proj" in family.fused_names:
            parts, widths = ["qkv_proj"], [sum(widths)]
        elif not self.shape.has_keys:
            parts, widths = parts[:1], widths[:1]
        is_head_norm = family.has_head_norm_in(config.has_head_norm, index in config.other_rope_layers)
        has_wide_norm = family.has_wide_norm or (is_head_norm and family.has_centered_head_norm)
        self.qkv = weights.linear(
            [f"{prefix}.self_attn.{name}" for name in parts],
            config.hidden_size,
            widths,
            config.has_qkv_bias,
            () if has_wide_norm else head_columns(self.shape),
        )
        self.wide_norms: tuple[Norm, Norm] | None = None
        if has_wide_norm:
            epsilon, head_dim = config.rms_norm_eps, sizes.head_dim if family.has_centered_head_norm else 0
            self.wide_norms = (
                weights.norm(f"{prefix}.self_attn.q_norm", queries, epsilon, head_dim=head_dim),
                weights.norm(f"{prefix}.self_attn.k_norm", keys, epsilon, head_dim=head_dim),
            )
        self.head_norm: HeadNorm | None = None
        if is_head_norm and not has_wide_norm:
            of_queries, of_keys = family.head_norm_names
            self.head_norm = weights.head_norm(
                f"{prefix}.self_attn.{of_queries}",
                f"{prefix}.self_attn.{of_keys}" if self.shape.has_keys else "",
                self.shape,
                config.rms_norm_eps,
                is_after_rotation=family.is_head_norm_after_rotation,
                has_weight=family.has_head_norm_weights,
                has_values=family.has_value_norm,
            )
        self.gate: Linear | None = None
        if family.has_query_gate:
            name, columns = f"{prefix}.self_attn.gate_proj", query_columns(self.shape)
            self.gate = weights.linear([name], config.hidden_size, [queries], config.has_qkv_bias, columns)
        self.output = weights.linear([f"{prefix}.self_attn.o_proj"], queries, [config.hidden_size], config.has_output_bias)
        self.attended = BranchEnd(norm(names.attended), factor)
        self.inner_norm = norm(names.inner)
        self.mlp = self.feed_forward(config, index, weights, prefix)
        factor *= multipliers.mlp_output
        if self.mlp is not None and (names.added or factor != 1.0):
            self.mlp = EndedFeedForward(self.mlp, BranchEnd(norm(names.added), factor))

    def feed_forward(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> FeedForward | None:
        return feed_forward(config, index, weights, prefix)

    def store(self, ops: OpTable, inputs: Inputs, h: Tensor, angles: Any, cache: LayerCache) -> tuple[Tensor, ...]:
        qkv = linear(ops, inputs, h, self.qkv)
        if self.wide_norms is not None:
            qkv = ops.normalize_wide(qkv, *self.wide_norms, self.shape)
        queries = ops.rotate_and_store(inputs, qkv, angles, self.head_norm, self.shape, cache)
        return (queries,) if self.gate is None else (queries, linear(ops, inputs, h, self.gate))

    def attend(self, ops: OpTable, step: Any, rows: Sequence[Tensor], cache: LayerCache) -> Tensor:
        queries, *gates = rows
        h = ops.attention(step, queries, self.shape, cache)
        for gate in gates:
            h = ops.multiply(h, ops.activate(gate, "sigmoid"))
        return self.attended.apply(ops, ops.all_gather(linear(ops, step, ops.all_gather(h), self.output)))


class Llama:
    """The whole model."""

    layer_class: type[Layer] = LlamaLayer
    recurrent_class: type[Layer] | None = None
    mlp_class: type[Layer] | None = None  # of layers that are an MLP, or experts, alone
    encoder: Tower | None = None  # of pictures and video
    drafts: Sequence[DraftLayer] = ()  # MTP layers

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [self.layer(config, index, weights, f"model.layers.{index}") for index in range(config.num_layers)]
        self.norm = declare_norm(config, weights, "model.norm")
        self.has_parallel_mlp = FAMILIES[config.architecture].has_parallel_mlp
        self.head = self.declare_head(weights)
        dims = {index in config.other_rope_layers: config.layer_shape(index).head_dim for index in range(config.num_layers)}
        head_dim = dims.get(False, config.head_dim)
        if config.attention_layers == ():  # the tables are not read
            head_dim = config.rope.rotary_dim or 1
        self.rotary = weights.rotary(config.rope, head_dim)
        self.other_rotary = weights.rotary(config.other_rope, dims[True]) if config.other_rope else None
        self.num_deepstack = len(config.vision.deepstack_layers) if config.vision else 0

    def layer(self, config: ModelConfig, index: int, weights: Weights, prefix: str) -> Layer:
        """Declare layer `index`."""
        found: type[Layer] | None = self.layer_class
        if config.recurrence is not None and index in config.recurrence.layers:
            found = self.recurrent_class
        elif config.attention_layers is not None and index not in config.attention_layers:
            found = self.mlp_class
        assert found is not None, f"{config.architecture} has no class for layer {index}"
        return found(config, index, weights, prefix)

    def declare_head(self, weights: Weights) -> Linear | None:
        """Declare the head; None if only hidden states are needed."""
        config = self.config
        if config.task == "classify":
            return weights.linear([CLASS_HEAD], config.hidden_size, [config.num_labels], columns=())  # whole on every rank
        if config.task == "embed":
            return None
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = weights.linear([name], config.hidden_size, [config.vocab_size], config.has_head_bias)
        head.bias_name, head.has_float_outputs = "lm_head.bias", True
        if config.tie_word_embeddings:
            self.embedding.tied = head
            head.is_looked_up = True
        return head

    def forward(self, ops: OpTable, inputs: Inputs, cache: KvCache) -> Tensor:
        """Return the last hidden states of the kept rows, normalized [kept, hidden]; keys and values of all rows are written to
        the cache."""
        step = ops.begin(inputs, cache)
        rotations = [self.rotation(ops, inputs, self.rotary)] * len(self.layers)
        if self.other_rotary is not None:
            other = self.rotation(ops, inputs, self.other_rotary)
            for index in self.config.other_rope_layers:
                rotations[index] = other
        has_features = inputs.features is not None
        residual = ops.embedding(inputs, self.embedding)
        if self.config.multipliers.embedding != 1.0:
            residual = ops.scale_and_add(residual, self.config.multipliers.embedding, None)
        if has_features:
            residual = ops.take_features(step, residual, 0)
        embedded = residual
        h = normalize(ops, residual, self.layers[0].input_norm)
        for index, layer in enumerate(self.layers):
            layer_cache = cache.of_layer(index)
            if index:
                h, residual = add_norm(ops, h, residual, layer.input_norm)
            angles, query_factors = rotations[index]
            rows = layer.store(ops, inputs, h, angles, layer_cache)
            if query_factors is not None:
                rows = (ops.multiply(rows[0], query_factors), *rows[1:])
            own = self.layer_input(ops, inputs, index, embedded)
            if layer is self.layers[-1]:
                step, residual, *kept = ops.keep_rows(step, residual, *rows, *own)
                rows, own = tuple(kept[: len(rows)]), kept[len(rows) :]
                h = normalize(ops, residual, layer.input_norm) if self.has_parallel_mlp else h
            attended = layer.attend(ops, step, rows, layer_cache)
            if layer.mlp is None:
                h = attended
            elif self.has_parallel_mlp:
                residual = ops.scale_and_add(attended, 1.0, residual)
                h = layer.mlp.forward(ops, step, h)
            else:
                h, residual = add_norm(ops, attended, residual, layer.inner_norm)
                h = layer.mlp.forward(ops, step, h)
            h, residual = self.end_layer(ops, index, h, residual, own)
            if has_features and index < self.num_deepstack:  # Qwen3-VL: features of the encoder's inner layers
                residual = ops.take_features(step, residual, index + 1)
        return add_norm(ops, h, residual, self.norm)[0]

    def layer_input(self, ops: OpTable, inputs: Inputs, index: int, embedded: Tensor) -> list[Tensor]:
        """Return what else layer `index` reads of each row: nothing, or one tensor (Gemma 4). `embedded`: input of layer 0."""
        return []

    def end_layer(self, ops: OpTable, index: int, h: Tensor, residual: Tensor, own: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return `h` and the residual that it is added to, after layer `index`. `own`: its `layer_input`."""
        return h, residual

    @staticmethod
    def rotation(ops: OpTable, inputs: Inputs, rotary: Rotary) -> tuple[Any, Tensor | None]:
        """Return the angles of the rows, and the factors of their queries if there are any."""
        factors = None if rotary.query_factors is None else ops.query_factors(inputs, rotary)
        return ops.rotary_angles(inputs, rotary), factors

    def logits(self, ops: OpTable, hidden: Tensor, row_ids: Tensor) -> Tensor:
        """Return logits of the kept rows `row_ids` [m] (m a multiple of the table's row_tile): [m, vocab], or [m, classes]."""
        assert self.head is not None, "the model only returns hidden states"
        logits = ops.all_gather(ops.linear(ops.take_rows(hidden, row_ids), self.head))
        multipliers = self.config.multipliers
        if multipliers.logits != 1.0:
            logits = ops.scale_and_add(logits, multipliers.logits, None)
        softcap = multipliers.softcap_of_logits
        if not softcap:
            return logits
        return ops.scale_and_add(ops.activate(ops.scale_and_add(logits, 1.0 / softcap, None), "tanh"), softcap, None)
