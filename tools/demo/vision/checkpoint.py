"""Write the vision demonstration model as a Hugging Face checkpoint. Called by `train.py`."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.demo.vision.batches import FRAMES_PER_SECOND, PIXEL_DEVIATION, PIXEL_MEAN
from tools.demo.vision.network import FRAMES_PER_ROW, Qwen3VL, VisionShape
from tools.demo.vision.sizes import MAX_CLIP_PIXELS, MAX_PIXELS, MERGE, MIN_PIXELS
from tools.demo.vision.vocabulary import IMAGE, VIDEO, VISION_END, VISION_START
from tools.demo.vocabulary import END_OF_TEXT, TURN_END

MAX_POSITION_EMBEDDINGS = 2048

# each frame of a clip gets start and end tokens at its time, in transformers and in the engine
CHAT_TEMPLATE = """\
{%- macro shown(content) -%}
{%- if content is string %}{{ content }}
{%- elif content %}
{%- for part in content %}
{%- if part['type'] in ('image', 'image_url') %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] in ('video', 'video_url') %}{{ '<|video_pad|>' }}
{%- else %}{{ part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + shown(message['content']) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def save(network: Qwen3VL, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face checkpoint: config, weights in bfloat16, tokenizer, chat template, processors."""
    folder.mkdir(parents=True, exist_ok=True)
    end_id, pad_id = (tokenizer.get_vocab()[token] for token in (TURN_END, END_OF_TEXT))
    contents = {
        "config": _config(network, tokenizer, end_id, pad_id),
        "generation_config": {"do_sample": False, "eos_token_id": end_id, "pad_token_id": pad_id, "temperature": 0.0},
        "preprocessor_config": _processor(network.shape.vision, "image_processor_type", "Qwen2VLImageProcessor", MAX_PIXELS),
        "tokenizer_config": {
            "clean_up_tokenization_spaces": False,
            "eos_token": TURN_END,
            "model_max_length": MAX_POSITION_EMBEDDINGS,
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "video_preprocessor_config": {
            **_processor(network.shape.vision, "video_processor_type", "Qwen3VLVideoProcessor", MAX_CLIP_PIXELS),
            "fps": FRAMES_PER_SECOND,
        },
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = {f"model.{name}": tensor.detach().bfloat16().contiguous() for name, tensor in network.state_dict().items()}
    patches = "model.visual.patch_embed.proj.weight"
    side = network.shape.vision.patch_size
    tensors[patches] = tensors[patches].view(-1, 3, FRAMES_PER_ROW, side, side)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _config(network: Qwen3VL, tokenizer: Tokenizer, end_id: int, pad_id: int) -> dict[str, object]:
    text = asdict(network.shape.text)
    vision = asdict(network.shape.vision) | {
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "model_type": "qwen3_vl_vision",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES_PER_ROW,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": end_id,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
            "model_type": "qwen3_vl_text",
            "pad_token_id": pad_id,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": list(network.shape.mrope_section),
                "rope_theta": text.pop("rope_theta"),
                "rope_type": "default",
            },
            "use_cache": True,
            **text,
        },
        "tie_word_embeddings": True,
        "video_token_id": tokenizer.token_to_id(VIDEO),
        "vision_config": vision,
        "vision_end_token_id": tokenizer.token_to_id(VISION_END),
        "vision_start_token_id": tokenizer.token_to_id(VISION_START),
    }


def _processor(shape: VisionShape, key: str, name: str, max_pixels: int) -> dict[str, object]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [PIXEL_MEAN] * 3,
        "image_std": [PIXEL_DEVIATION] * 3,
        key: name,
        "merge_size": MERGE,
        "patch_size": shape.patch_size,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": max_pixels, "shortest_edge": MIN_PIXELS},
        "temporal_patch_size": FRAMES_PER_ROW,
    }


@torch.no_grad()
def start_from(network: Qwen3VL, tokenizer: Tokenizer, folder: Path) -> None:
    """Load the weights of a checkpoint with the same widths. An additional encoder block, the last but one, starts without
    effect; a new token starts as the mean of the bytes that spelled it."""
    old = {name.removeprefix("model."): tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    last = max(int(name.split(".")[2]) for name in old if name.startswith("visual.blocks."))
    depth = network.shape.vision.depth
    for name, parameter in network.named_parameters():
        if name == "language_model.embed_tokens.weight":
            old_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
            for token, token_id in tokenizer.get_vocab().items():
                parts = [old_ids[token]] if token in old_ids else [old_ids[symbol] for symbol in token]
                parameter[token_id] = old[name][parts].mean(0)
            continue
        source = name
        if name.startswith("visual.blocks."):
            place = int(name.split(".")[2])
            if place == depth - 1:
                source = name.replace(f"blocks.{place}.", f"blocks.{last}.")
            elif place >= last:
                if ".attn.proj." in name or ".mlp.linear_fc2." in name:
                    parameter.zero_()
                continue
        parameter.copy_(old[source].view_as(parameter))
