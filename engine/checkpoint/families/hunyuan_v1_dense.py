"""Hunyuan dense (Tencent 2025): llama with a norm of each query and key head after it is rotated."""

from __future__ import annotations

from types import MappingProxyType

from engine.checkpoint.families.family import Biases, Family
from engine.checkpoint.json_fields import JsonOptions


class HunyuanV1Dense(Family):
    name = "hunyuan_v1_dense"
    gguf_name = "hunyuan-dense"
    gguf_names = MappingProxyType({"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"})
    class_names = ("HunYuanDenseV1ForCausalLM",)
    harmless_options = frozenset(
        (
            *("add_classification_head", "class_num", "eod_token_id", "im_start_id", "im_end_id", "org_vocab_size"),
            *("mask_init_id", "pad_id", "sep_token_id", "pool_type", "text_start_id", "text_end_id", "use_qk_norm"),
            *("cla_share_factor", "attention_head_dim", "dense_list", "im_newline_id", "enable_lm_head_fp32"),
            *("moe_topk", "num_shared_expert", "routed_scaling_factor", "norm_topk_prob"),  # of experts that it does not have
            *("anyres_pooling_size", "num_media_embeds", "video_start_id", "video_end_id"),  # of pictures, as are the next
            *("vit_input_resolution", "vit_mapping_type", "vit_norm_type", "vit_patch", "vit_token"),
        )
    )
    rms_norm_eps = 1e-5
    has_head_norm = True
    head_norm_names = ("query_layernorm", "key_layernorm")
    is_head_norm_after_rotation = True
    has_rope_alpha = True

    def biases(self, options: JsonOptions) -> Biases:
        options.check_supported({"num_experts": 1, "norm_type": "rms", "use_rotary_pos_emb": True})
        return super().biases(options)
