"""Makes the expected outputs of encoders: `units.npz` of each golden vision checkpoint, and the checkpoint `paddleocr_vl` with
its `golden.json`.

Run by hand, in an environment of its own (`pip install torch==2.13.0 transformers==5.23.0 pillow numpy safetensors`):

    python tests/golden/make_units.py   # and `make_features.py` after it

`units.npz` has for each of UNITS the features that transformers computes of it, [tokens, width], in float32; the pixels are
generated again from a seed where they are needed (`pixels_of`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY = Path(__file__).parent
MODELS = ("qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe", "paddleocr_vl")
# frames, and patches in height and width: one token, several windows with a rest on both sides, wide, tall, video
UNITS = ((1, 2, 2), (1, 10, 14), (1, 4, 22), (1, 26, 2), (2, 6, 4), (2, 10, 6))


def pixels_of(frames: int, height: int, width: int, patch_size: int) -> np.ndarray[Any, Any]:
    """Return uint8 [frames, height * patch_size, width * patch_size, 3]."""
    generator = np.random.default_rng([frames, height, width])
    return generator.integers(0, 256, (frames, height * patch_size, width * patch_size, 3), np.uint8)


def patches_of(frames: np.ndarray[Any, Any], patch: int, merge: int, per_patch: int, settings: dict[str, Any]) -> Any:
    """Return the patches of the published processors: [rows in time, squares, patches of a square, channel, frames, patch,
    patch]."""
    import torch

    values = frames.astype(np.float32) * np.float32(settings["rescale_factor"])
    values = (values - np.array(settings["image_mean"], np.float32)) / np.array(settings["image_std"], np.float32)
    if len(values) < per_patch:
        values = np.repeat(values, per_patch, axis=0)
    count, height, width, _ = values.shape
    cut = values.transpose(0, 3, 1, 2).reshape(
        count // per_patch, per_patch, 3, height // patch // merge, merge, patch, width // patch // merge, merge, patch
    )
    ordered = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return torch.tensor(np.ascontiguousarray(ordered.reshape(-1, 3 * per_patch * patch * patch)))


def in_rows(patches: Any, height: int, width: int, merge: int, patch: int) -> Any:
    """Return squares of patches as rows of patches, each [3, patch, patch]."""
    squares = patches.reshape(-1, height // merge, width // merge, merge, merge, 3, patch, patch)
    return squares.permute(0, 1, 3, 2, 4, 5, 6, 7).reshape(-1, 3, patch, patch)


def features_of(model: Any, name: str, unit: tuple[int, int, int], settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    import torch

    frames, height, width = unit
    vision = model.config.vision_config
    patch, merge = vision.patch_size, vision.spatial_merge_size
    per_patch = 2 if name.startswith("qwen") else 1
    patches = patches_of(pixels_of(*unit, patch), patch, merge, per_patch, settings)
    grid = torch.tensor([[frames if per_patch == 1 else 1, height, width]])
    if name == "paddleocr_vl":
        patches = in_rows(patches, height, width, merge, patch)
    with torch.no_grad():
        if name == "ernie4_5_vl_moe":  # its method for pictures expects one frame
            states = model.model.vision_tower(patches, grid).last_hidden_state
            return np.asarray(model.model.resampler_model(states, grid))
        found = model.model.get_image_features(patches, grid)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return np.asarray(torch.cat([torch.cat(list(part)) for part in parts], dim=1))


def make_paddleocr() -> None:
    """Write a tiny checkpoint under the published names, flat as it is published, with the outputs of transformers."""
    import torch
    from PIL import Image
    from safetensors.torch import save_file
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    directory, other = DIRECTORY / "paddleocr_vl", DIRECTORY / "qwen2_5_vl"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(other, directory, symlinks=True, ignore=shutil.ignore_patterns("*.safetensors", "*.npz"))
    text = {
        "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "use_bias": False, "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0,
        "rope_theta": 500000.0,
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
    }  # fmt: skip
    config = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl", "torch_dtype": "float32",
        **text,
        "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4,
        "vision_config": {
            "model_type": "paddleocr_vl", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_channels": 3, "image_size": 98, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "tokens_per_second": 2, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-06,
        },
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings |= {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    torch.manual_seed(7)
    nested = {name: value for name, value in config.items() if name not in text}
    nested |= {"text_config": text, "tie_word_embeddings": False}
    model = PaddleOCRVLForConditionalGeneration._from_config(PaddleOCRVLConfig(**nested), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name and name.endswith("weight")
            drawn = torch.randn_like(weight) * (0.2 if is_norm else 0.15) + (1.0 if is_norm else 0.0)
            weight.copy_(drawn.to(torch.bfloat16))  # as they are stored
    published = {}
    for name, weight in model.state_dict().items():
        for ours, theirs in (
            ("model.language_model.", "model."),
            ("model.visual.", "visual."),
            ("model.projector.", "mlp_AR."),
        ):
            name = name.replace(ours, theirs, 1) if name.startswith(ours) else name
        published[name] = weight.to(torch.bfloat16).contiguous()
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})
    cases = json.loads((other / "golden.json").read_text())["cases"]
    for case in cases:
        patches, grids = [], []
        for path in case["images"]:
            picture = np.asarray(Image.open(directory / path).convert("RGB"))
            height, width = picture.shape[0] // 14, picture.shape[1] // 14
            cut = patches_of(picture[None], 14, 2, 1, settings)
            patches.append(in_rows(cut, height, width, 2, 14))
            grids.append([1, height, width])
        assert grids == case["image_grid_thw"], f"the pictures of {case['images']} are to be resized"
        case |= generated(model, case["prompt_token_ids"], torch.cat(patches), torch.tensor(grids))
    golden = {"made_with": "transformers 5.23.0, torch 2.13.0, float32", "cases": cases}
    (directory / "golden.json").write_text(json.dumps(golden) + "\n")


def generated(model: Any, prompt: list[int], patches: Any, grids: Any, count: int = 24) -> dict[str, Any]:
    """Return greedy tokens with the five best log-probabilities of each, and those of the prompt."""
    import torch

    tokens, top = list(prompt), []
    prompt_logprobs: list[float | None] = [None]
    for _ in range(count):
        ids = torch.tensor([tokens])
        types = (ids == 5).int()
        with torch.no_grad():
            logits = model(
                input_ids=ids, mm_token_type_ids=types, pixel_values=patches, image_grid_thw=grids, use_cache=False
            ).logits[0]
        logprobs = logits.double().log_softmax(-1)
        if len(prompt_logprobs) == 1:
            prompt_logprobs += [round(float(logprobs[place, token]), 5) for place, token in enumerate(prompt[1:])]
        best = logprobs[-1].topk(5)
        top.append([[int(token), round(float(value), 5)] for value, token in zip(best.values, best.indices, strict=True)])
        tokens.append(int(best.indices[0]))
    return {"greedy_token_ids": tokens[len(prompt) :], "top_logprobs": top, "prompt_logprobs": prompt_logprobs}


def main() -> None:
    from transformers import AutoModelForImageTextToText

    make_paddleocr()
    for name in MODELS:
        directory = DIRECTORY / name
        settings = json.loads((directory / "preprocessor_config.json").read_text())
        model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
        units = [unit for unit in UNITS if unit[0] == 1 or name != "paddleocr_vl"]
        found = {"x".join(map(str, unit)): features_of(model, name, unit, settings) for unit in units}
        np.savez_compressed(directory / "units.npz", **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
