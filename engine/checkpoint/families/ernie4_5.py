"""ERNIE 4.5, dense (Baidu 2025): Llama with interleaved rotary pairs, and with a bias in all projections or none."""

from __future__ import annotations

from engine.checkpoint.families.drafts import ERNIE4_5, DraftNames
from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.json_fields import JsonOptions


class Ernie4_5(Family):
    name = "ernie4_5"
    has_training_options = True
    class_names: tuple[str, ...] = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")  # the second is Paddle's spelling
    num_kv_heads = 2
    draft_names: DraftNames | None = ERNIE4_5
    is_rotary_interleaved = True
    rms_norm_eps = 1e-5
    rope_theta = 500_000.0
    ties_word_embeddings = True
    head_dim = 128

    def biases(self, options: JsonOptions) -> Biases:
        bias = options.flag("use_bias", False)
        return Biases(bias, bias, bias)
