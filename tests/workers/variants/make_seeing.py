"""Adds new and changed configurations to `tests/golden/drawn/seeing.json`: other shapes and options of the architectures that
see, with what transformers 5.23 answers about two pictures and a video of two units (torch and transformers are not needed to
run the tests); and new names to `golden.json`, the same of the golden checkpoints:

python -m tests.workers.variants.make_seeing
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.golden.make_units import DIRECTORY, MODELS, in_rows, patches_of, pixels_of
from tests.paths import DRAWN
from tests.workers.variants import is_first, published_name
from tests.workers.variants.make import values_of

IMAGE, VIDEO, START, END = 5, 6, 3, 4
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 2,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
AROUND = {"vision_start_token_id": START, "vision_end_token_id": END}
GEMMA_TEXT = {key: value for key, value in TEXT.items() if key != "hidden_act"} | {"head_dim": 20}
QWEN2_5 = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], **TOKENS, **AROUND}
QWEN2 = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], **TOKENS, **AROUND}
QWEN3_MOE = {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"], **TOKENS, **AROUND}
QWEN3 = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], **TOKENS, **AROUND}
QWEN3_5 = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], **TOKENS, **AROUND}
QWEN3_5_MOE = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], **TOKENS, **AROUND}
RECURRENT = {"num_hidden_layers": 3, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
RECURRENT |= {"linear_key_head_dim": 12, "linear_value_head_dim": 8}
ERNIE = {"model_type": "ernie4_5_vl_moe", "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], **TOKENS}
ERNIE |= {"image_start_token_id": START, "image_end_token_id": END}
OCR = {"model_type": "paddleocr_vl", "architectures": ["PaddleOCRVLForConditionalGeneration"], **TOKENS, **AROUND}
GEMMA: dict[str, Any] = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
GEMMA |= {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
MISTRAL: dict[str, Any] = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
MISTRAL |= {"image_token_index": IMAGE, "vision_feature_layer": -1}
LLAVA: dict[str, Any] = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
LLAVA |= {"image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
GEMMA4: dict[str, Any] = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None}
GEMMA4 |= {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 7, "boi_token_id": START, "eoi_token_id": END}
BREAK = 7  # between rows, in the tokenizer's files


def rope(*sections: int, **options: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **options}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl flat and old, tied, heads of 80, windows with a rest": {
        **QWEN2_5,
        **TEXT,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [3, 4, 5]},
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": 3, "hidden_size": 160, "num_heads": 2, "intermediate_size": 56,
            "out_hidden_size": 48, "patch_size": 8, "window_size": 40, "fullatt_block_indexes": [0, 2], "in_chans": 3,
        },
    },
    "qwen2_5_vl one frame a patch, one patch a token, one head, windows everywhere, sliding windows, gelu": {
        **QWEN2_5,
        "text_config": {
            **TEXT, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1,
            "hidden_act": "gelu_pytorch_tanh", "rope_parameters": rope(2, 2, 2),
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "num_heads": 1, "intermediate_size": 40, "out_hidden_size": 48, "patch_size": 6,
            "spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 30, "fullatt_block_indexes": [],
            "hidden_act": "gelu",
        },
    },
    "qwen2_5_vl nine patches a token, three frames a patch, yarn": {
        **QWEN2_5,
        "text_config": {
            **TEXT,
            "rope_parameters": rope(1, 2, 3, rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        },
        "vision_config": {
            "depth": 2, "hidden_size": 72, "num_heads": 1, "intermediate_size": 40, "out_hidden_size": 48, "patch_size": 4,
            "spatial_merge_size": 3, "temporal_patch_size": 3, "tokens_per_second": 5, "window_size": 25,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl three inner layers, the last one too, heads of 72, biases, untied": {
        **QWEN3,
        "text_config": {
            **TEXT, "num_hidden_layers": 3, "head_dim": 24, "attention_bias": True,
            "rope_parameters": rope(4, 4, 4, mrope_interleaved=True),
        },
        "vision_config": {
            "depth": 4, "hidden_size": 144, "num_heads": 2, "intermediate_size": 40, "out_hidden_size": 48, "patch_size": 6,
            "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2, 3],
        },
    },
    "qwen3_vl no inner layer, one frame a patch, one place, tied, old rope": {
        **QWEN3,
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT, "head_dim": 16, "rope_theta": 5000.0, "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 40, "out_hidden_size": 48, "patch_size": 6,
            "spatial_merge_size": 1, "temporal_patch_size": 1, "num_position_embeddings": 1, "deepstack_visual_indexes": [],
        },
    },
    "qwen3_5 recurrent layers before and after, tied": {
        **QWEN3_5,
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT, **RECURRENT, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": rope(3, 3, 2, mrope_interleaved=True, partial_rotary_factor=0.5), "tie_word_embeddings": True,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 72, "num_heads": 1, "intermediate_size": 40, "out_hidden_size": 48, "patch_size": 6,
            "num_position_embeddings": 16,
        },
    },
    "qwen3_5_moe": {
        **QWEN3_5_MOE,
        "tie_word_embeddings": False,
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "intermediate_size"}, **RECURRENT,
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": rope(4, 2, 2, mrope_interleaved=True, partial_rotary_factor=0.5), "tie_word_embeddings": False,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 40, "out_hidden_size": 48, "patch_size": 6,
            "spatial_merge_size": 1, "temporal_patch_size": 1, "num_position_embeddings": 9,
        },
    },
    "ernie4_5_vl_moe every other layer sparse, shared experts, untied": {
        **ERNIE,
        "tie_word_embeddings": False,
        "text_config": {
            **TEXT, "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "moe_num_experts": 6,
            "moe_k": 3, "moe_num_shared_experts": 2, "moe_intermediate_size": [24, 16], "tie_word_embeddings": False,
            "rope_parameters": rope(2, 2, 2),
        },
        "vision_config": {
            "depth": 2, "hidden_size": 80, "num_heads": 1, "intermediate_size": 56, "patch_size": 6, "hidden_act": "gelu",
        },
    },
    "paddleocr_vl flat, biases, tied, a table with a rest": {
        **OCR,
        **TEXT,
        "head_dim": 20,
        "use_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 4, 4]},
        "vision_config": {
            "model_type": "paddleocr_vl", "num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 1,
            "intermediate_size": 40, "patch_size": 6, "image_size": 33, "spatial_merge_size": 3, "layer_norm_eps": 1e-5,
        },
    },
    "qwen2_vl flat and old, one KV head": {
        **QWEN2,
        **TEXT,
        "num_key_value_heads": 1,
        "rope_theta": 100000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]},
        "vision_config": {
            "depth": 2, "embed_dim": 64, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2, "in_chans": 3, "patch_size": 6,
        },
    },
    "qwen2_vl one patch a token, sliding windows, tied": {
        **QWEN2,
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "rope_parameters": rope(1, 2, 3),
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "depth": 2, "embed_dim": 72, "hidden_size": 48, "num_heads": 1, "mlp_ratio": 3, "patch_size": 4,
            "spatial_merge_size": 1, "hidden_act": "gelu",
        },
    },
    "qwen3_vl_moe a dense layer": {
        **QWEN3_MOE,
        "tie_word_embeddings": False,
        "text_config": {
            **TEXT, "num_hidden_layers": 3, "head_dim": 16, "mlp_only_layers": [1], "num_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "rope_parameters": rope(4, 2, 2, mrope_interleaved=True),
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "depth": 3, "hidden_size": 72, "num_heads": 1, "intermediate_size": 40, "out_hidden_size": 48, "patch_size": 6,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [1],
        },
    },
    "gemma3 nine tokens of four patches, windows within a picture, heads of 10": {
        **GEMMA,
        "mm_tokens_per_image": 9,
        "text_config": {
            **GEMMA_TEXT, "num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 36, "patch_size": 6, "vision_use_head": False,
        },
    },
    "gemma3 one patch a token, wide windows, linear rope, unused head": {
        **GEMMA,
        "mm_tokens_per_image": 16,
        "text_config": {
            **GEMMA_TEXT, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"],
            "num_key_value_heads": 1, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 50000.0,
            "rope_local_base_freq": 5000.0,
        },
        "vision_config": {
            "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16,
            "patch_size": 4, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
        },
    },
    "mistral3 four patches a token, windows, projector biases": {
        **MISTRAL,
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "mistral", "head_dim": 20, "sliding_window": 7, "tie_word_embeddings": False},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 80, "intermediate_size": 56, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 96, "patch_size": 6, "rope_theta": 5000.0,
        },
    },
    "mistral3 of ministral3, nine patches a token, tied, silu": {
        **MISTRAL,
        "spatial_merge_size": 3,
        "projector_hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "text_config": {
            **TEXT, "model_type": "ministral3", "head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
            },
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 1, "image_size": 96, "patch_size": 4, "hidden_act": "silu",
        },
    },
    "llava with pixtral, one patch a token": {
        **LLAVA,
        "tie_word_embeddings": False,
        "text_config": {
            **TEXT, "model_type": "mistral", "head_dim": 12, "num_key_value_heads": 1, "sliding_window": None,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 96, "patch_size": 6,
        },
    },
    "llava with llama and tanh, features of the layer before the last": {
        **LLAVA,
        "vision_feature_layer": -2,
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "llama", "hidden_act": "tanh", "tie_word_embeddings": False},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 96, "patch_size": 6,
        },
    },
    "gemma4 pictures seen whole in layers with a window, own inputs of layers, limits": {
        **GEMMA4,
        "text_config": {
            **GEMMA_TEXT, "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 5, "global_head_dim": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 1,
            "use_bidirectional_attention": "vision", "pad_token_id": 9,
        },
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "patch_size": 6, "pooling_kernel_size": 2,
            "position_embedding_size": 40, "use_clipped_linears": True,
        },
    },
    "gemma4 causal, standardized, nine patches a token, keys as values": {
        **GEMMA4,
        "vision_soft_tokens_per_image": 280,
        "text_config": {
            **GEMMA_TEXT, "model_type": "gemma4_text", "num_hidden_layers": 3, "sliding_window": 64, "global_head_dim": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True, "num_key_value_heads": 1, "final_logit_softcapping": 5.0,
        },
        "vision_config": {
            "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
            "num_key_value_heads": 3, "head_dim": 8, "patch_size": 4, "position_embedding_size": 25, "standardize": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 1e-5,
        },
    },
}  # fmt: skip
NUM_OUTPUTS = 10
IN_ROWS = ("paddleocr_vl", "gemma3", "gemma4", "mistral3", "llava")  # patches in rows, and no video
WITH_BREAKS = ("mistral3", "llava")  # a token between two rows
WITHOUT_AXES = ("gemma3", "gemma4", "mistral3", "llava")  # whole pictures, and positions of one number
PLAIN_SCALE = {"rescale_factor": 1 / 255, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
SCALE_OF_PIXELS = {"rescale_factor": 1 / 255, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.25, 0.26, 0.27]}


class Case:
    """A prompt with its media: `units` as tests take them, positions as the model needs them."""

    def __init__(
        self,
        config: dict[str, Any],
        seed: int,
        scale: dict[str, Any] = SCALE_OF_PIXELS,
        pictures: Sequence[tuple[int, int]] = ((2, 5), (3, 1)),
        has_video: bool = True,
        around: Sequence[int] = (),
    ) -> None:
        self.scale = PLAIN_SCALE if config["model_type"] == "gemma4" else scale
        self.kind, vision = config["model_type"], config["vision_config"]
        self.kind = {"qwen3_vl_moe": "qwen3_vl"}.get(self.kind, self.kind)
        self.patch, self.merge = vision["patch_size"], vision.get("spatial_merge_size", 2)
        self.has_rows = self.kind in IN_ROWS
        if self.kind == "gemma3":
            self.side = isqrt(config["mm_tokens_per_image"])
            self.merge = vision["image_size"] // vision["patch_size"] // self.side
        if self.kind == "gemma4":
            self.merge = vision.get("pooling_kernel_size", 3)
        if self.kind in WITH_BREAKS:
            self.merge = config.get("spatial_merge_size", 2 if self.kind == "mistral3" else 1)
        self.per_patch = vision.get("temporal_patch_size", 2) if self.kind.startswith("qwen") else 1
        per_second = vision.get("tokens_per_second", 4)
        self.rng = np.random.default_rng(seed)
        self.prompt: list[int] = []
        self.units: list[dict[str, int | bool]] = []
        self.positions: list[np.ndarray[Any, Any]] = []
        self.position = 0
        self.pixels: dict[int, list[Any]] = {IMAGE: [], VIDEO: []}
        self.grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
        self.text(*self.rng.integers(8, 96, 4).tolist())
        for height, width in [(self.side, self.side)] * len(pictures) if self.kind == "gemma3" else pictures:
            self.text(*around, START)
            self.unit(IMAGE, 1, height, width, 0, False)
            self.text(END, *around, *self.rng.integers(8, 96, 2).tolist())
        if has_video and not self.has_rows:
            self.text(START)
            for index in range(2):
                time = {"qwen2_5_vl": int(index * self.per_patch / 2 * per_second), "qwen3_vl": 0}.get(self.kind, index)
                self.unit(
                    VIDEO,
                    2 if self.kind == "ernie4_5_vl_moe" else self.per_patch,
                    2,
                    3,
                    time,
                    index > 0 and self.kind != "qwen3_vl",
                )
                if self.kind == "qwen3_vl":
                    self.text(END, int(self.rng.integers(8, 96)), *([] if index else [START]))
            self.text(END)
        self.text(*self.rng.integers(8, 96, 5).tolist())

    def text(self, *tokens: int) -> None:
        self.prompt += tokens
        self.positions.append(np.tile(np.arange(len(tokens)) + self.position, (3, 1)))
        self.position += len(tokens)

    def unit(self, token: int, frames: int, height: int, width: int, time: int, is_continued: bool) -> None:
        grid = (height * self.merge, width * self.merge)
        self.units.append(
            {"start": len(self.prompt), "frames": frames, "height": height, "width": width, "time": time}
            | {"is_continued": is_continued}
        )
        self.base = self.base if is_continued else self.position
        axes = np.meshgrid([time], np.arange(height), np.arange(width), indexing="ij")
        self.positions.append(np.stack(axes).reshape(3, -1) + self.base)
        if self.kind in WITHOUT_AXES:
            self.positions[-1] = np.tile(np.arange(height * width) + self.base, (3, 1))
        if self.kind in WITH_BREAKS:
            self.positions[-1] = np.tile(np.arange(height * (width + 1) - 1) + self.base, (3, 1))
            self.prompt += (([token] * width + [BREAK]) * height)[:-1]
        else:
            self.prompt += [token] * (height * width)
        self.position = max(self.position, int(self.positions[-1].max()) + 1)
        found = patches_of(pixels_of(frames, *grid, self.patch), self.patch, self.merge, self.per_patch, self.scale)
        self.pixels[token].append(in_rows(found, *grid, self.merge, self.patch) if self.has_rows else found)
        if self.kind in WITHOUT_AXES:
            rows = self.pixels[token][-1].reshape(*grid, 3, self.patch, self.patch)
            if self.kind == "gemma4":
                self.pixels[token][-1] = rows.permute(0, 1, 3, 4, 2).reshape(*grid, -1)
            else:
                self.pixels[token][-1] = rows.permute(2, 0, 3, 1, 4).reshape(1, 3, *(self.patch * side for side in grid))
        times = frames // self.per_patch if frames > 1 else 1
        if is_continued:
            self.grids[token][-1][0] += times
        else:
            self.grids[token].append([times, *grid])

    def answered(self, model: Any) -> dict[str, Any]:
        """Return greedy tokens and the 3 best log-probabilities of each, without a cache."""
        tokens, tops = list(self.prompt), []
        prompt = np.concatenate(self.positions, axis=1)
        media = {
            key: torch.cat(self.pixels[token]) for key, token in (("pixel_values", IMAGE), ("pixel_values_videos", VIDEO))
            if self.pixels[token] and self.kind not in (*WITH_BREAKS, "gemma4")
        } | {
            key: torch.tensor(self.grids[token]) for key, token in (("image_grid_thw", IMAGE), ("video_grid_thw", VIDEO))
            if self.grids[token]
        }  # fmt: skip
        for _ in range(NUM_OUTPUTS):
            behind = np.tile(np.arange(len(tokens) - len(self.prompt)) + self.position, (3, 1))
            places = torch.from_numpy(np.concatenate([prompt, behind], axis=1))[:, None].long()
            kinds = [(token == IMAGE) + 2 * (token == VIDEO) for token in self.prompt] + [0] * behind.shape[1]
            options: dict[str, Any] = {"mm_token_type_ids": torch.tensor([kinds])}
            if self.kind in WITHOUT_AXES:
                places = places[0]
                name = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}.get(self.kind)
                options = {name: torch.tensor([kinds])} if name else {}
                media.pop("image_grid_thw", None)
            if self.kind == "gemma4":
                media |= self.padded_patches()
            if self.kind in WITH_BREAKS:
                sizes = [[int(side) for side in pixels.shape[-2:]] for pixels in self.pixels[IMAGE]]
                most = [max(each) for each in zip(*sizes, strict=True)]
                media["pixel_values"] = torch.cat(
                    [
                        torch.nn.functional.pad(pixels, (0, most[1] - width, 0, most[0] - height))
                        for pixels, (height, width) in zip(self.pixels[IMAGE], sizes, strict=True)
                    ]
                )
                media["image_sizes"] = torch.tensor(sizes)
            if self.kind == "ernie4_5_vl_moe":
                is_media = [bool(kind) or token in (START, END) for kind, token in zip(kinds, tokens, strict=True)]
                is_media[len(self.prompt) :] = [False] * behind.shape[1]
                options["moe_mm_token_type_ids"] = torch.tensor([is_media]).int()
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor([tokens]), position_ids=places, use_cache=False, **media, **options
                ).logits[0, -1]
            best = logits.double().log_softmax(-1).topk(3)
            tops.append([[int(token), round(float(value), 6)] for value, token in zip(*best, strict=True)])
            tokens.append(tops[-1][0][0])
            if tokens[-1] in (IMAGE, VIDEO):
                break
        return {"greedy_token_ids": tokens[len(self.prompt) :], "top_logprobs": tops}

    def padded_patches(self) -> dict[str, Any]:
        """Return the patches of each picture and their places, padded to one length."""
        grids = [pixels.shape[:2] for pixels in self.pixels[IMAGE]]
        most = max(height * width for height, width in grids)
        patches = torch.zeros(len(grids), most, 3 * self.patch**2)
        places = torch.full((len(grids), most, 2), -1)
        for index, (height, width) in enumerate(grids):
            patches[index, : height * width] = self.pixels[IMAGE][index].flatten(0, 1)
            columns, rows = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
            places[index, : height * width] = torch.stack([columns, rows], dim=-1).flatten(0, 1)
        return {"pixel_values": patches, "image_position_ids": places}


def expected_of(config: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    case = Case(config, seed)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        (Path(directory) / "config.json").write_text(json.dumps(config))
        AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
        (Path(directory) / "config.json").write_text(json.dumps(config))
        stored = load_file(path)
        drawn = {name: drawn_of(name, tuple(tensor.shape), config) for name, tensor in stored.items()}
        save_file(drawn, path, metadata={"format": "pt"})
        model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager", dtype="float32").eval()
    answer = case.answered(model)
    found = answer["greedy_token_ids"]
    if {IMAGE, VIDEO} & {*found} or len({*found}) < 3:  # transformers takes them for media; a dull answer tests little
        return expected_of(config, seed + 1)
    shapes = {
        ours: shape
        for name, tensor in sorted(stored.items())
        if is_first(name)
        for ours, shape in shapes_of(published_name(name), tuple(tensor.shape), config)
    }
    return {"config": config, "shapes": shapes, "prompt_token_ids": case.prompt, "units": case.units, **answer}


def drawn_of(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> Any:
    if name.endswith("mm_input_projection_weight"):
        return torch.from_numpy(values_of(published_name(name), shape[::-1], config).T.copy())
    return torch.from_numpy(np.asarray(values_of(published_name(name), shape, config)))


def shapes_of(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return our name and shape; of experts stored as one tensor [experts, out, in] those of the first, and of queries with
    gates both."""
    name = name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    if name.startswith("vision_tower.head."):
        return []
    if name.endswith("mm_input_projection.weight"):
        return [(name, shape[::-1])]
    if config["model_type"].startswith("qwen3_5") and name.endswith(".self_attn.q_proj.weight"):
        return [(each, (shape[0] // 2, shape[1])) for each in (name, name.replace("q_proj", "gate_proj"))]
    prefix, _, part = name.rpartition(".experts.")
    if part == "gate_up_proj":
        return [(f"{prefix}.experts.0.{each}.weight", (shape[1] // 2, shape[2])) for each in ("gate_proj", "up_proj")]
    if part == "down_proj":
        return [(f"{prefix}.experts.0.down_proj.weight", (shape[1], shape[2]))]
    return [(name, shape)]


def golden_of(name: str) -> dict[str, Any]:
    path = DIRECTORY / name
    scale = json.loads((path / "preprocessor_config.json").read_text())
    case = Case(json.loads((path / "config.json").read_text()), 1, scale)
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    return {"prompt_token_ids": case.prompt, "units": case.units, **case.answered(model)}


def stored_results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DRAWN / name).read_text())
    return found


def write(name: str, results: dict[str, Any]) -> None:
    lines = ",\n".join(f"{json.dumps(title)}: {json.dumps(result)}" for title, result in results.items())
    (DRAWN / name).write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    golden, seeing = stored_results("golden.json"), stored_results("seeing.json")
    write("golden.json", {name: golden[name] if name in golden else golden_of(name) for name in MODELS})
    configs = {name: json.loads(json.dumps(config)) for name, config in CONFIGS.items()}
    results = {
        name: seeing[name] if seeing.get(name, {}).get("config") == config else expected_of(config)
        for name, config in configs.items()
    }
    write("seeing.json", results)
