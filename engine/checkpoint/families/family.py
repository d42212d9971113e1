"""Differences between families of models. Used by `model_config.py` and `gguf/` in every process that reads a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from engine.checkpoint.families.drafts import DraftNames
from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.families.recurrence import Recurrence
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.vision_config import VisionConfig

MAX_LAYERS = 4096  # each takes memory before weights are read
_MAX_DRAFT_LAYERS = 64


class Biases(msgspec.Struct, frozen=True):
    """Projections that add a bias."""

    qkv: bool  # queries, keys and values
    output: bool  # attention output projection
    mlp: bool
    head: bool = False


class NormNames(msgspec.Struct, frozen=True):
    """Tensors of a layer's norms; empty: the layer has no such norm."""

    input: str = "input_layernorm"  # before attention
    attended: str = ""  # of what attention adds to the residual
    inner: str = "post_attention_layernorm"  # before the MLP
    added: str = ""  # of what the MLP adds to the residual


class Multipliers(msgspec.Struct, frozen=True):
    """Constant factors."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and the MLP add
    logits: float = 1.0
    scores: float = 0.0  # of attention; 0: head_dim^-0.5
    keys: float = 1.0
    attention_input: float = 1.0
    attention_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0
    softcap_of_scores: float = 0.0  # x becomes softcap * tanh(x / softcap); 0: it stays
    softcap_of_logits: float = 0.0


class QueryScaling(msgspec.Struct, frozen=True):
    """A factor of queries that grows with their position: 1 + beta * log(1 + floor((position + first) / interval))."""

    beta: float
    interval: float
    first: int = 0


class LayerShape(msgspec.Struct, frozen=True):
    """Sizes of one layer."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of its MLP
    source: int  # the layer that stores the keys and values that it reads: itself, or an earlier one
    has_value_weights: bool = True  # False: values are the keys, before their norm and rotation


class Latents(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, 2024): sizes of the latents per position, and of the parts of a head."""

    query_dim: int  # width of compressed queries; 0: not compressed
    latent_dim: int  # width of compressed keys and values
    plain_dim: int  # unrotated elements of a head's queries and keys
    rotary_dim: int  # the same for the rotated part; the rotated key is shared by all heads
    value_dim: int  # of a head


class PositionTables(msgspec.Struct, frozen=True):
    """Learned positions and text types of encoders, and their classifier."""

    num_position_rows: int  # learned, as stored
    first_position: int  # the row of a text's first token
    num_token_types: int  # rows of another table, for a first and a second text
    has_deep_head: bool  # the classifier has its own dense layer; otherwise the model's pooler is used


class Family:
    """The common conventions of config.json; a family overrides its differences."""

    name: str  # `model_type` in config.json
    other_names: tuple[str, ...] = ()  # the same, from other publishers
    gguf_name: str | None = ""  # `general.architecture` in GGUF files; empty: the same; None: such files are not read
    gguf_names_with_pictures: tuple[str, ...] = ()  # the same, of models that take pictures and have this text model
    class_names: tuple[str, ...]  # in `architectures` of config.json; the first is written by converters
    other_trunk_names: tuple[str, ...] = ()  # of classes that pool: before Model and ForSequenceClassification
    model: str = "workers.models.llama:Llama"  # the class that computes it, as module:class
    is_rotary_interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + rotary_dim / 2)
    has_training_options: bool = False  # config.json has any options of the training, so that unknown ones are no error
    harmless_options: frozenset[str] = frozenset()  # of config.json, without effect on what is computed
    has_rope_alpha: bool = False  # `alpha` of rope type "dynamic" scales the base, for all lengths alike
    has_proportional_rope: bool = False  # rope type "proportional" is supported
    has_partial_rotary: bool = False  # rope type "default" may rotate a part of each head; other families ignore that option
    has_rotary: bool = True  # queries and keys are rotated by position
    other_rope_types: Mapping[str, str] = MappingProxyType({})  # names that older files use for a rope type
    other_option_names: Mapping[str, str] = MappingProxyType({})  # another name in config.json -> the name read here
    norm_epsilon_name: str = "rms_norm_eps"  # in config.json
    activation_name: str = "hidden_act"  # in config.json
    norm_names: NormNames = NormNames()
    norm_kind: Literal["rms", "layer", "layer without bias"] = "rms"
    has_parallel_mlp: bool = False  # the MLP reads what attention reads, and both are added to the residual
    mlp_width_name: str = "intermediate_size"  # in config.json
    mlp_name: str = "mlp"  # of its tensors, within a layer
    plain_mlp_names: tuple[str, ...] = ()  # tensors of an MLP without a gate, inner(x) and outer(x); empty: it has one
    has_mlp_beside_experts: bool = False  # sparse layers have an MLP of their own, too
    norm_offset: float = 0.0  # added to the stored weights of norms
    has_head_norm: bool = False  # each query and key head is normalized
    head_norm_option: str = ""  # of config.json, that says the same; empty: none
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    is_head_norm_after_rotation: bool = False  # otherwise before it
    has_head_norm_weights: bool = True
    has_centered_head_norm: bool = False  # head norms subtract the mean, and each head has weights of its own
    has_value_norm: bool = False  # each value head is normalized, too, without a weight
    has_wide_norm: bool = False  # all queries of a token are normalized as one before they are rotated, and so are all keys
    has_query_gate: bool = False  # attention's outputs are multiplied by sigmoids that are projected with the queries
    recurrent_module: str = ""  # with the linears of a recurrent layer, if adapters may change these
    has_joined_inputs: bool = False  # recurrent layers are stored with the parts of each head side by side
    has_sinks: bool = False  # each query head has a learned score that takes part in the softmax, without a value
    fused_names: tuple[str, ...] = ()  # of "qkv_proj" and "gate_up_proj", those that are stored as one tensor
    unused_tensors: str = ""  # pattern of stored tensors that are not read; empty: none
    has_turned_experts: bool = False  # experts stored as one tensor are [experts, in, out], also where shapes do not show it
    has_interleaved_experts: bool = False  # likewise, with gate and up in alternating columns, and as gpt-oss names them
    gguf_options: frozenset[str] = frozenset()  # options of GGUF files, beyond the common ones, that `of_gguf` reads
    gguf_names: Mapping[str, str] = MappingProxyType({})  # a tensor's name in GGUF files -> in checkpoints, where it is special
    is_permuted_in_gguf: bool = False  # GGUF files store the rows of queries and keys with pairs as neighbours
    has_tiled_heads_in_gguf: bool = False  # they have the first value head of each key head, then the second of each, and so on
    mrope_layout: str = ""  # layout of M-RoPE sections, a key of `mrope.LAYOUTS`; empty: no M-RoPE

    media: MediaRules | None = None  # None: the family takes no media
    has_unread_encoder: bool = False  # its files may have an encoder of pictures, `vision_config`, that is not supported
    draft_names: DraftNames | None = None  # tensor names of MTP layers; None: the family has none

    pooled_kind: Literal["last", "mean", "cls"] = "last"  # default pooling of hidden states

    # defaults of config.json
    default_rope: Mapping[str, Any] = MappingProxyType({})  # if it has no rope parameters
    default_draft_layers: int = 0
    rms_norm_eps: float = 1e-6
    activation: str = "silu"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    local_rope_theta: float = 0.0  # of layers with a sliding window; 0: they rotate like the others
    ties_word_embeddings: bool = False
    can_tie_word_embeddings: bool = True  # False: the head has weights of its own, whatever config.json says
    outer_ties_word_embeddings: bool | None = None  # of all of a config.json with a text_config; None: what that says
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    num_kv_heads: int = 0  # 0: num_attention_heads

    def text_defaults(self, text: JsonOptions) -> Mapping[str, Any]:
        """Return defaults of the text model that are not among those above."""
        return {}

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, False)

    def is_interleaved(self, options: JsonOptions) -> bool:
        return self.is_rotary_interleaved

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        """Return what config.json says beyond the common options, from the metadata of a GGUF file of this architecture."""
        return {}

    def rope_of_gguf(self, options: JsonOptions) -> dict[str, Any]:
        """Return what the rope parameters say beyond the common options; see `of_gguf`."""
        return {}

    def multipliers(self, options: JsonOptions) -> Multipliers:
        return Multipliers()

    def head_norm(self, options: JsonOptions) -> bool:
        """Return whether each query and key head is normalized."""
        return options.flag(self.head_norm_option, self.has_head_norm) if self.head_norm_option else self.has_head_norm

    def has_head_norm_in(self, has_head_norm: bool, has_other_rope: bool) -> bool:
        """Return whether heads are normalized in a layer of a model with head norms, that may have the other rope."""
        return has_head_norm

    def is_rotated(self, options: JsonOptions) -> bool:
        """Return whether queries and keys are rotated by position."""
        return self.has_rotary

    def rotary_share(self, options: JsonOptions) -> float:
        """Return the part of each head that is rotated, if the rope parameters do not say."""
        return options.number("partial_rotary_factor", self.partial_rotary_factor)

    def layer_shapes(self, options: JsonOptions, num_layers: int) -> tuple[LayerShape, ...]:
        """Return the shape of each layer; empty: all are alike."""
        return ()

    def layer_inputs_dim(self, options: JsonOptions, num_layers: int) -> int:
        """Return the width of each layer's own embedding of a token (Gemma 4); 0: layers have none."""
        return 0

    def same_inputs(self, options: JsonOptions, text: JsonOptions) -> tuple[tuple[int, int], ...]:
        """Return tokens that have the embeddings of another one: pairs of both."""
        return ()

    def causal_layers(self, options: JsonOptions, windows: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers that are causal also within pictures that other layers see whole."""
        return ()

    def unrotated_layers(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        """Return the layers that do not rotate queries and keys."""
        return ()

    def query_scaling(self, options: JsonOptions, rope: JsonOptions, *, is_rotated: bool) -> QueryScaling | None:
        """Return the scaling of queries in layers that are rotated, or in the others."""
        return None

    def has_chunks(self, options: JsonOptions) -> bool:
        """Return whether windows are chunks: they begin at multiples of their size."""
        return False

    def latents(self, options: JsonOptions) -> Latents | None:
        """Return the latents; None: attention over keys and values of each head."""
        return None

    def position_tables(self, options: JsonOptions) -> PositionTables | None:
        """Return the learned positions of an encoder; None: positions are rotated."""
        return None

    def is_bidirectional(self, options: JsonOptions) -> bool:
        """Return whether tokens attend to the whole prompt, which is then computed in one step."""
        return not options.flag("is_causal", True)

    def num_draft_layers(self, options: JsonOptions) -> int:
        """Return the number of additional layers that predict further tokens; they are loaded only if requested."""
        if self.draft_names is None:
            return 0
        return options.count("num_nextn_predict_layers", self.default_draft_layers, least=0, most=_MAX_DRAFT_LAYERS)

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        """Return for each layer how many keys a query sees, itself included; 0: all before it."""
        return (0,) * num_layers

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        """Return the recurrent layers; None: the family, or the model, has none."""
        return None

    def attention_layers(self, options: JsonOptions, num_layers: int, recurrence: Recurrence | None) -> tuple[int, ...] | None:
        """Return the layers with attention; None: all. Layers without attention or recurrence are an MLP, or experts."""
        return recurrence.others(num_layers) if recurrence is not None else None

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        """Return the experts, possibly of no layer; None: the family, or the model, has none."""
        return None

    # vision-language models only

    def vision(self, options: JsonOptions, text: JsonOptions) -> VisionConfig | None:
        """Read the vision encoder from all of config.json; `text` is its text part. None: the model takes only text."""
        return None

    def mrope_sections(self, text: JsonOptions, rope: JsonOptions, num_pairs: int) -> tuple[int, ...]:
        """Return the pairs of each axis, in the order of the family's layout. Only with a layout."""
        raise NotImplementedError

    def vision_experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        """Read the experts of media tokens, stored after those of text. None: all tokens share the same experts."""
        return None
