"""Gemma 4 (Google 2026), its text model: head sizes and rotations by kind of layer, last layers that read the keys and values
of earlier ones, an embedding of each token for every layer, and experts beside an MLP."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Family, LayerShape, Multipliers, NormNames
from engine.checkpoint.families.gemma3 import Gemma3
from engine.checkpoint.families.windows import all_but_every, layer_windows
from engine.checkpoint.json_fields import JsonOptions

_DEFAULT_KV_HEADS = 4


class Gemma4(Family):
    name = "gemma4_text"
    class_names: tuple[str, ...] = ("Gemma4ForCausalLM",)
    num_kv_heads = 4
    other_trunk_names = ("Gemma4Text",)
    gguf_name: str | None = "gemma4"
    gguf_options = frozenset(
        ("attention.sliding_window", "final_logit_softcapping", "feed_forward_length", "attention.head_count_kv")
    )
    gguf_names = MappingProxyType(
        {
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp.scale": "router.scale.weight",
            "ffn_down_exps.scale": "router.per_expert_scale",
        }
    )
    has_mlp_beside_experts = True
    harmless_options = frozenset(("num_experts", "top_k_experts", "moe_intermediate_size"))  # without enable_moe_block
    unused_tensors = (
        r"^(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\."
        r"|\.self_attn\.([kv]_proj|[kv]_norm)\."  # of layers that read those of another
    )
    model = "workers.models.gemma4:Gemma4"
    activation_name = "hidden_activation"
    activation = "gelu_pytorch_tanh"
    ties_word_embeddings = True
    head_dim = 256
    has_head_norm = True
    has_value_norm = True
    norm_names = NormNames(
        attended="post_attention_layernorm", inner="pre_feedforward_layernorm", added="post_feedforward_layernorm"
    )
    rope_theta = 1_000_000.0
    local_rope_theta = 10_000.0
    has_proportional_rope = True
    default_rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        is_local = options.values.get("attention.sliding_window_pattern")
        if not isinstance(is_local, list) or len(is_local) != num_layers:
            raise options.error(
                "attention.sliding_window_pattern", f"{is_local!r} should have a flag for each of {num_layers} layers"
            )
        kv_heads, widths = (_per_layer(options, key, num_layers) for key in ("attention.head_count_kv", "feed_forward_length"))
        full = {
            str(index): {"head_dim": options.count("attention.key_length"), "num_key_value_heads": kv_heads[index]}
            for index in range(num_layers)
            if not is_local[index]
        }
        of_local = [kv_heads[index] for index in range(num_layers) if is_local[index]]
        return {
            self.activation_name: self.activation,
            "layer_types": ["sliding_attention" if each else "full_attention" for each in is_local],
            "sliding_window": options.count("attention.sliding_window"),
            "rope_local_base_freq": options.number("rope.freq_base_swa", 10_000.0),
            "head_dim": options.count("attention.key_length_swa"),
            "num_key_value_heads": (of_local or kv_heads)[0],
            "per_layer_config": full,
            "num_kv_shared_layers": options.count("attention.shared_kv_layers", 0, least=0),
            "intermediate_size": widths[0],
            "use_double_wide_mlp": widths[-1] != widths[0],
            "hidden_size_per_layer_input": options.count("embedding_length_per_layer_input", 0, least=0),
            "vocab_size_per_layer_input": 0,  # the same
            "final_logit_softcapping": options.number("final_logit_softcapping", 0.0, least=0),
        }

    @staticmethod
    def sees_pictures_whole(options: JsonOptions) -> bool:
        return bool(options.values.get("use_bidirectional_attention") == "vision")

    def causal_layers(self, options: JsonOptions, windows: tuple[int, ...]) -> tuple[int, ...]:
        is_bounded = not self.sees_pictures_whole(options)
        return () if is_bounded else tuple(index for index, window in enumerate(windows) if not window)

    def multipliers(self, options: JsonOptions) -> Multipliers:
        options.check_supported({"use_bidirectional_attention": "vision"})  # text is causal then
        return Multipliers(
            embedding=options.count("hidden_size") ** 0.5,
            scores=1.0,
            softcap_of_logits=Gemma3.softcap(options, "final_logit_softcapping", 0.0),
        )

    def sliding_windows(self, options: JsonOptions, num_layers: int) -> tuple[int, ...]:
        windows = layer_windows(options, options.count("sliding_window", 512), all_but_every(6, num_layers))
        return (*windows[:-1], 0)  # as transformers forces it

    def layer_inputs_dim(self, options: JsonOptions, num_layers: int) -> int:
        dim = options.count("hidden_size_per_layer_input", 256, least=0)
        vocab_size = options.count("vocab_size")
        rows = options.count("vocab_size_per_layer_input", 262_144, least=0) or vocab_size
        if dim and rows != vocab_size:
            raise options.error("vocab_size_per_layer_input", f"{rows} should be vocab_size, {vocab_size}")
        return dim

    def layer_shapes(self, options: JsonOptions, num_layers: int) -> tuple[LayerShape, ...]:
        windows = self.sliding_windows(options, num_layers)
        sources = _sources(options, windows)
        has_keys_as_values = options.flag("attention_k_eq_v", False)
        is_wide, width = options.flag("use_double_wide_mlp", False), options.count("intermediate_size")
        heads = [_heads(options, index, window, has_keys_as_values) for index, window in enumerate(windows)]
        for kind in (True, False):
            found = {each for each, window in zip(heads, windows, strict=True) if bool(window) == kind}
            if len(found) > 1:
                raise options.error("per_layer_config", f"layers of one kind should have the same heads, not {sorted(found)}")
        return tuple(
            LayerShape(*heads[index], width * (2 if is_wide and sources[index] != index else 1), sources[index], not shares)
            for index, window in enumerate(windows)
            for shares in [has_keys_as_values and not window]
        )

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        if not options.flag("enable_moe_block", False):
            return None
        count = num_experts(options, "num_experts", default=0)
        return ExpertsConfig(
            tuple(range(num_layers)),
            count,
            num_chosen(options, "top_k_experts", None, count),
            options.count("moe_intermediate_size"),
            scales="router.per_expert_scale",
            is_normalized=True,
        )


def _per_layer(options: JsonOptions, key: str, num_layers: int) -> list[int]:
    """Return a number for each layer, from a list of GGUF files, or from one for all."""
    values = options.values.get(key)
    if not isinstance(values, list):
        return [options.count(key)] * num_layers
    if len(values) != num_layers or not all(type(value) is int and value > 0 for value in values):
        raise options.error(key, f"{values!r} should be {num_layers} positive integers")
    return values


def _sources(options: JsonOptions, windows: tuple[int, ...]) -> list[int]:
    """Return for each layer the one with its keys and values: for the last `num_kv_shared_layers` the last of the same kind
    before them."""
    first = len(windows) - options.count("num_kv_shared_layers", 0, least=0, most=len(windows) - 1)
    owners = {bool(window): index for index, window in enumerate(windows[:first])}
    if any(bool(window) not in owners for window in windows):
        raise options.error(
            "num_kv_shared_layers", f"{len(windows) - first} leaves no layer of some kind in layer_types that stores keys"
        )
    return [index if index < first else owners[bool(window)] for index, window in enumerate(windows)]


def _heads(options: JsonOptions, index: int, window: int, has_keys_as_values: bool) -> tuple[int, int]:
    """Return the number of KV heads of a layer, and their size."""
    num_heads = options.count("num_attention_heads")
    kv_heads, head_dim = options.count("num_key_value_heads", _DEFAULT_KV_HEADS), options.count("head_dim", 256)
    global_dim = options.count("global_head_dim", 512)
    global_kv_heads = options.count("num_global_key_value_heads", kv_heads)
    if options.values.get("per_layer_config") is not None:
        by_layer = options.within("per_layer_config")
        keys = {int(key): key for key in by_layer.values if key.isdecimal() and len(key) < 9}  # "05" with ten layers or more
        own = by_layer.within(keys.get(index, str(index)))
        kv_heads, head_dim = own.count("num_key_value_heads", kv_heads), own.count("head_dim", head_dim)
    elif not window:
        kv_heads, head_dim = global_kv_heads if has_keys_as_values else kv_heads, global_dim
    if num_heads % kv_heads:
        name = "num_key_value_heads" if window else "num_global_key_value_heads"
        raise options.error(name, f"{kv_heads} does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        raise options.error("head_dim" if window else "global_head_dim", f"{head_dim} is odd; rotary embeddings need pairs")
    return kv_heads, head_dim
