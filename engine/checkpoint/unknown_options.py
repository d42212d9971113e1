"""Options of a config.json that nothing here reads, and that may change what the model computes.

`ModelConfig` has them; the launcher refuses a model that has some (`--ignore-config-keys` names those to be ignored).
"""

from __future__ import annotations

import re
from typing import Any

from engine.checkpoint.families.family import Family
from engine.checkpoint.json_fields import JsonOptions

# Last parts of names, after a dot, for training, bookkeeping and generation. Biases, because the loader reports tensors that
# are not read.
_HARMLESS = re.compile(
    r"_.*|unsloth_.*|auto_map|architectures|model_type|.*transformers_version|js_config|(torch_)?dtype|tokenizer_class"
    r"|attn_implementation|use_flash_attn(ention)?.*|use_cache|use_return_dict|return_dict|chunk_size_feed_forward"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|.*_token_ids?|.*_token_index|.*_token_list"
    r"|initializer_.*|.*init_std|.*dropout|.*_pdrop|gradient_checkpointing|pretraining_tp|seq_length|max_sequence_length"
    r"|.*_loss_coef|.*_loss_weight|aux_loss_alpha|seq_aux|router_jitter_noise|ep_size|output_.*|z_loss_.*|rescale_.*"
    r"|cache_implementation|is_llama_config|is_composition|ignore_index|full_attn_mod|interpolate_factor|moe_capacity|moe_gate|compression_ratio"
    r"|multi_token_pred_lambda|max_length|min_length|do_sample|num_beams|temperature|top_k|top_p|typical_p|.*_penalty|diversity_.*"
    r"|num_return_sequences|.*bias|max_window_layers|spatial_patch_size|fused_.*|use_bfloat16|fp16|bf16|fp32"
)
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_CHECKED_ELSEWHERE = ("quantization_config.", "sentence_transformers.")
_CHANGING_IF_FALSE = ("is_causal", "use_rope", "use_rotary_embedding", "use_rotary", "rotary")


def unknown_options(options: JsonOptions, text: JsonOptions, family: Family) -> dict[str, Any]:
    """Return the options that were not read, without those that have no effect: harmless ones, those that are off, and those
    beside the text model's object that it has too. Options of an inner object are named `object.option`."""
    unread = {name: value for name, value in options.unread().items() if text is options or name not in text.values}
    return {
        name: value
        for name, value in unread.items()
        if not name.startswith(_CHECKED_ELSEWHERE) and _may_change(name.rpartition(".")[2], value, family)
    }


def _may_change(name: str, value: Any, family: Family) -> bool:
    if name in family.harmless_options or _HARMLESS.fullmatch(name):
        return False
    return value is False if name in _CHANGING_IF_FALSE else value not in _OFF
