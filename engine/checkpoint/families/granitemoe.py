"""Granite with experts (IBM 2024), in every layer; the newer class has an MLP for all tokens beside them."""

from __future__ import annotations

from engine.checkpoint.families.experts import ExpertsConfig, num_chosen, num_experts
from engine.checkpoint.families.family import Biases
from engine.checkpoint.families.granite import Granite
from engine.checkpoint.json_fields import JsonOptions


class GraniteMoe(Granite):
    name = "granitemoe"
    gguf_name: str | None = None  # read as the newer class
    class_names: tuple[str, ...] = ("GraniteMoeForCausalLM",)

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("attention_bias", False)
        return Biases(bias, bias, False)

    def experts(self, options: JsonOptions, num_layers: int) -> ExpertsConfig | None:
        """Return the experts. The softmax is over the chosen ones, which is that of all, normalized."""
        count = num_experts(options, "num_local_experts", "num_experts", default=8)
        return ExpertsConfig(
            tuple(range(num_layers)),
            count,
            num_chosen(options, "num_experts_per_tok", 2, count),
            options.count("intermediate_size", 11008),
            self.shared_width(options),
            is_normalized=True,
        )

    def shared_width(self, options: JsonOptions) -> int:
        return 0


class GraniteMoeShared(GraniteMoe):
    name = "granitemoeshared"
    gguf_name: str | None = "granitemoe"
    class_names = ("GraniteMoeSharedForCausalLM",)

    def shared_width(self, options: JsonOptions) -> int:
        return options.count("shared_intermediate_size", 0, least=0)
