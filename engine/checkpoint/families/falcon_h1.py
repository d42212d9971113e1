"""Falcon-H1 (TII 2025): every layer has attention and Mamba-2 side by side, and constant factors of most tensors."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from engine.checkpoint.activations import read_activation
from engine.checkpoint.families import mamba_in_gguf
from engine.checkpoint.families.family import Biases, Family, Multipliers, NormNames
from engine.checkpoint.families.recurrence import (
    MAMBA_NAMES,
    UNUSED_MAMBA_OPTIONS,
    Mamba,
    Recurrence,
    state_spaces,
    time_step_limits,
)
from engine.checkpoint.json_fields import JsonOptions

_NUM_FACTORS = 5  # of gates, x, B, C and time steps


class FalconH1(Family):
    name = "falcon_h1"
    gguf_name = "falcon-h1"
    gguf_names = MappingProxyType(mamba_in_gguf.tensor_names("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"})
    class_names = ("FalconH1ForCausalLM",)
    model = "workers.models.falcon_h1:FalconH1"
    norm_names = NormNames(inner="pre_ff_layernorm")
    recurrent_module = "mamba"
    harmless_options = UNUSED_MAMBA_OPTIONS | {
        *("mamba_chunk_size", "num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor", "expansion_factor"),
        *("layer_types", "layers_block_type"),  # all alike
    }
    num_kv_heads = 8
    rms_norm_eps = 1e-5

    def of_gguf(self, options: JsonOptions, num_layers: int) -> dict[str, Any]:
        """Return the sizes; factors are in the weights."""
        sizes = mamba_in_gguf.sizes(options, MAMBA_NAMES)
        return {**sizes, "mamba_d_ssm": options.count("ssm.inner_size"), "mamba_norm_before_gate": False}

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, options.flag("mlp_bias", False))

    def multipliers(self, options: JsonOptions) -> Multipliers:
        gate, down = _numbers(options, "mlp_multipliers", 2)
        return Multipliers(
            embedding=options.number("embedding_multiplier", 1.0),
            logits=options.number("lm_head_multiplier", 1.0),
            keys=options.number("key_multiplier", 1.0, above=0),
            attention_input=options.number("attention_in_multiplier", 1.0),
            attention_output=options.number("attention_out_multiplier", 1.0),
            mlp_gate=gate,
            mlp_output=down,
        )

    def recurrence(self, options: JsonOptions, num_layers: int) -> Recurrence | None:
        least, most = time_step_limits(options)
        is_before_gate = options.flag("mamba_norm_before_gate", True)
        factors = _numbers(options, "ssm_multipliers", _NUM_FACTORS)
        mamba = Mamba(
            read_activation(options, self.activation_name, self.activation),
            least,
            most,
            has_input_bias=options.flag("mamba_proj_bias", False),
            has_output_bias=options.flag("projectors_bias", False),
            norm=("before gate" if is_before_gate else "after gate") if options.flag("mamba_rms_norm", False) else "none",
            input_factor=options.number("ssm_in_multiplier", 1.0),
            factors=factors if any(factor != 1.0 for factor in factors) else (),
            output_factor=options.number("ssm_out_multiplier", 1.0),
        )
        width = options.count("mamba_expand", 2) * options.count("hidden_size")
        if "mamba_d_ssm" not in options.values or options.values["mamba_d_ssm"] is not None:
            width = options.count("mamba_d_ssm", 1024)
        return state_spaces(options, tuple(range(num_layers)), width, mamba)

    def attention_layers(self, options: JsonOptions, num_layers: int, recurrence: Recurrence | None) -> None:
        return None


def _numbers(options: JsonOptions, name: str, count: int) -> tuple[float, ...]:
    """Read `count` factors; 1 by default."""
    found = options.numbers(name) if options.values.get(name) is not None else (1.0,) * count
    if len(found) != count:
        raise options.error(name, f"{list(found)} should be {count} numbers")
    return found
