"""Makes checkpoints of random shapes of the families that take pictures, with the answers of transformers about one to three
pictures (and a video):

python -m tests.workers.variants.random_pictures OUT [--family NAME ...] [--count N] [--seed N]

`python -m tests.workers.variants.check_shapes OUT` serves them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.workers.variants import make_seeing, random_shapes
from tests.workers.variants.make_seeing import PLAIN_SCALE, SCALE_OF_PIXELS, Case
from tests.workers.variants.random_shapes import MARGIN, Config, Draw, experts, randomize

MEDIA_TOKENS = {make_seeing.IMAGE, make_seeing.VIDEO, make_seeing.START, make_seeing.END, make_seeing.BREAK}
PARAGRAPH = 7  # in Gemma 3's vocabulary, around pictures
ANY_SIZE = {"min_pixels": 1, "max_pixels": 1 << 24, "size": {"longest_edge": 4096}}
ACTIVATIONS = ["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu"]


def vision(draw: Draw, text: Config, names: tuple[str, str, str] = ("depth", "hidden_size", "num_heads")) -> Config:
    """Return the part that all encoders have; `names`: of depth, width and heads."""
    heads = draw.choice([1, 2, 3])
    head_dim = 4 * draw.choice([1, 3, 4, 5, 8, 18, 20])
    sizes = (draw.choice([1, 2, 3, 4]), heads * head_dim, heads)
    config = dict(zip(names, sizes, strict=True))
    config |= {"patch_size": draw.choice([2, 4, 5, 6, 8, 14]), "intermediate_size": draw.choice([24, 37, 56])}
    if draw.flag():
        config["hidden_act"] = draw.choice(ACTIVATIONS)
    return config


def merged(draw: Draw, text: Config) -> Config:
    config = vision(draw, text) | {"spatial_merge_size": draw.choice([1, 2, 2, 3]), "out_hidden_size": text["hidden_size"]}
    if draw.flag():
        config["temporal_patch_size"] = draw.choice([1, 2, 3])
    return config


def sections(draw: Draw, text: Config, **options: Any) -> None:
    """Give the text model a rotation for three axes."""
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    pairs = head_dim // 2
    height = draw.randrange(1, max(2, pairs // 3 + 1))
    width = draw.randrange(1, max(2, pairs // 3 + 1))
    parts = {"mrope_section": [pairs - height - width, height, width], **options}
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        text.pop(name, None)
    theta, kind = draw.choice([1e4, 1e6]), draw.choice(["default", "default", "default", "linear", "yarn"])
    scaling: Config = {"rope_type": kind}
    if kind != "default":
        scaling["factor"] = draw.choice([2.0, 4.0])
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 32
    if draw.flag():
        text["rope_parameters"] = {"rope_theta": theta, **scaling, **parts}
    else:
        text["rope_theta"] = theta
        text["rope_scaling"] = {**scaling, **parts}


def text_of(draw: Draw, maker: Callable[[Draw], Config], least_pairs: int = 4) -> Config:
    while True:
        text = maker(draw) | {"vocab_size": draw.choice([96, 128])}
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        if head_dim // 2 >= least_pairs and head_dim % 2 == 0:
            return text


def around(draw: Draw, family: str, text: Config, encoder: Config, **options: Any) -> Config:
    config: Config = {"model_type": family, **make_seeing.TOKENS, **make_seeing.AROUND, **options}
    tied = text["tie_word_embeddings"]
    return config | {"tie_word_embeddings": tied, "text_config": text, "vision_config": encoder}


def qwen2_vl(draw: Draw) -> Config:
    text = text_of(draw, random_shapes.qwen2)
    sections(draw, text)
    encoder = merged(draw, text)
    encoder |= {"embed_dim": encoder["hidden_size"], "hidden_size": text["hidden_size"], "mlp_ratio": draw.choice([1, 2, 4])}
    for name in ("out_hidden_size", "intermediate_size"):
        encoder.pop(name)
    return around(draw, "qwen2_vl", text, encoder)


def qwen2_5_vl(draw: Draw) -> Config:
    text = text_of(draw, random_shapes.qwen2)
    sections(draw, text)
    encoder = merged(draw, text)
    side = encoder["patch_size"] * encoder["spatial_merge_size"]
    layers = range(encoder["depth"])
    encoder |= {
        "window_size": side * draw.choice([1, 2, 3, 8]) + draw.randrange(side),
        "fullatt_block_indexes": sorted(draw.sample(layers, draw.randrange(len(layers) + 1))),
    }
    return around(draw, "qwen2_5_vl", text, encoder)


def deepstack(draw: Draw, text: Config) -> Config:
    encoder = merged(draw, text)
    layers = range(encoder["depth"])
    count = draw.randrange(min(len(layers), text["num_hidden_layers"]) + 1)
    return encoder | {
        "num_position_embeddings": draw.choice([1, 4, 9, 25, 64]),
        "deepstack_visual_indexes": sorted(draw.sample(layers, count)),
    }


def qwen3_text(draw: Draw) -> Config:
    text = random_shapes.qwen3(draw)
    for name in ("use_sliding_window", "sliding_window", "max_window_layers"):
        text.pop(name, None)
    return text


def qwen3_vl(draw: Draw) -> Config:
    text = text_of(draw, qwen3_text)
    sections(draw, text, mrope_interleaved=True)
    return around(draw, "qwen3_vl", text, deepstack(draw, text))


def qwen3_vl_moe(draw: Draw) -> Config:
    text = text_of(draw, qwen3_text) | experts(draw, "num_experts")
    text |= {"decoder_sparse_step": draw.choice([1, 1, 2]), "mlp_only_layers": [0] if draw.flag(0.3) else []}
    sections(draw, text, mrope_interleaved=True)
    return around(draw, "qwen3_vl_moe", text, deepstack(draw, text))


def ernie4_5_vl_moe(draw: Draw) -> Config:
    text = text_of(draw, lambda draw: draw.base(use_bias=draw.flag()), least_pairs=6)
    while (text["hidden_size"] // text["num_attention_heads"] // 2) % 2:
        text = text_of(draw, lambda draw: draw.base(use_bias=draw.flag()), least_pairs=6)
    pairs = text["hidden_size"] // text["num_attention_heads"] // 2
    side = draw.randrange(1, (pairs - 1) // 2 + 1)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": draw.choice([1e4, 5e5]),
        "mrope_section": [side, side, pairs - 2 * side],
    }
    total = draw.choice([4, 6])
    text |= {
        "moe_num_experts": total,
        "moe_k": draw.randrange(1, total),
        "moe_num_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": [draw.choice([12, 20]), draw.choice([12, 16])],
    }
    if draw.flag():
        text["mlp_layer_types"] = [draw.choice(["sparse", "dense"]) for _ in range(text["num_hidden_layers"])]
    encoder = vision(draw, text) | {"spatial_merge_size": 2}
    tokens = {"image_start_token_id": make_seeing.START, "image_end_token_id": make_seeing.END}
    tokens |= {"video_start_token_id": make_seeing.START, "video_end_token_id": make_seeing.END}
    return around(draw, "ernie4_5_vl_moe", text, encoder, **tokens)


WIDTHS = ("num_hidden_layers", "hidden_size", "num_attention_heads")


def paddleocr_vl(draw: Draw) -> Config:
    text = text_of(draw, lambda draw: draw.base(use_bias=draw.flag(), head_dim=draw.choice([8, 12, 20])))
    sections(draw, text)
    encoder = vision(draw, text, WIDTHS) | {"spatial_merge_size": draw.choice([1, 2, 3])}
    encoder["image_size"] = encoder["patch_size"] * draw.choice([1, 3, 7]) + draw.choice([0, 1])
    return around(draw, "paddleocr_vl", text, encoder)


def gemma_tokens(draw: Draw) -> Config:
    if draw.flag():
        return {"image_token_index": 5, "boi_token_index": 3, "eoi_token_index": 4}
    return {"image_token_id": 5, "boi_token_id": 3, "eoi_token_id": 4}


def gemma3(draw: Draw) -> Config:
    text = text_of(draw, random_shapes.gemma3_text)
    text.pop("use_bidirectional_attention", None)
    encoder = vision(draw, text, WIDTHS)
    side, per_token = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3])
    encoder["image_size"] = encoder["patch_size"] * side * per_token
    if draw.flag():
        encoder["vision_use_head"] = False
    if draw.flag():
        encoder["layer_norm_eps"] = 1e-5
    config = around(draw, "gemma3", text | {"model_type": "gemma3_text"}, encoder | {"model_type": "siglip_vision_model"})
    for name in (*make_seeing.TOKENS, *make_seeing.AROUND):
        config.pop(name)
    return config | gemma_tokens(draw) | {"mm_tokens_per_image": side * side}


def gemma4(draw: Draw) -> Config:
    text = text_of(draw, random_shapes.gemma4_text) | {"model_type": "gemma4_text", "pad_token_id": draw.choice([0, 9])}
    text["use_bidirectional_attention"] = draw.choice([None, "vision"])
    if text["hidden_size_per_layer_input"]:
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    encoder = vision(draw, text, WIDTHS)
    kv_heads = draw.choice([each for each in (1, 2, 3) if encoder["num_attention_heads"] % each == 0])
    encoder |= {
        "model_type": "gemma4_vision",
        "head_dim": draw.choice([4, 8, 12, 24]),
        "num_key_value_heads": kv_heads,
        "pooling_kernel_size": draw.choice([2, 3]),  # transformers keeps no token with 1
        "position_embedding_size": 210 + draw.choice([0, 3]),
        "use_clipped_linears": draw.flag(),
        "standardize": draw.flag(),
    }
    if "hidden_act" in encoder:
        encoder["hidden_activation"] = encoder.pop("hidden_act")
    if draw.flag():
        encoder["rope_parameters"] = {"rope_type": "default", "rope_theta": draw.choice([50.0, 1000.0])}
    config = around(draw, "gemma4", text, encoder, audio_config=None, audio_token_id=7, boi_token_id=3, eoi_token_id=4)
    for name in make_seeing.AROUND:
        config.pop(name)
    return config


def pixtral(draw: Draw, text: Config) -> Config:
    encoder = vision(draw, text, WIDTHS) | {"model_type": "pixtral"}
    encoder["image_size"] = encoder["patch_size"] * 3 * 7
    if draw.flag():
        rope = {"rope_theta": draw.choice([100.0, 5000.0])}
        encoder |= draw.choice([rope, {"rope_parameters": {"rope_type": "default", **rope}}])
    return encoder


def with_breaks(draw: Draw, family: str, text: Config) -> Config:
    config = around(draw, family, text, pixtral(draw, text))
    for name in (*make_seeing.TOKENS, *make_seeing.AROUND):
        config.pop(name)
    depth = config["vision_config"]["num_hidden_layers"]
    layer = draw.choice([-1, depth, *range(-depth, 0)])
    config |= {
        draw.choice(["image_token_index", "image_token_id"]): 5,
        "vision_feature_layer": draw.choice([layer, layer, [layer]]),
    }
    if draw.flag():
        config["projector_hidden_act"] = draw.choice(ACTIVATIONS)
    if draw.flag():
        config["multimodal_projector_bias"] = draw.flag()
    return config


def mistral3(draw: Draw) -> Config:
    name = draw.choice(["mistral", "ministral3"])
    text = text_of(draw, getattr(random_shapes, name)) | {"model_type": name}
    config = with_breaks(draw, "mistral3", text)
    return config | ({"spatial_merge_size": draw.choice([1, 2, 3])} if draw.flag() else {})


def llava(draw: Draw) -> Config:
    name = draw.choice(["mistral", "mistral", "llama"])
    text = text_of(draw, getattr(random_shapes, name)) | {"model_type": name}
    return with_breaks(draw, "llava", text) | {"vision_feature_select_strategy": "full"}


FAMILIES: dict[str, Callable[[Draw], Config]] = {
    maker.__name__: maker
    for maker in (
        *(qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, ernie4_5_vl_moe, paddleocr_vl, gemma3, gemma4, mistral3, llava),
    )
}
PROCESSOR = {"patch_size": "patch_size", "merge_size": "spatial_merge_size", "temporal_patch_size": "temporal_patch_size"}


def limit(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw the buffers of Gemma 4's encoder: limits on both sides of 0, and numbers that standardize."""
    for name, buffer in model.named_buffers():
        drawn = torch.randn(buffer.shape, generator=generator).abs()
        if name.endswith(("_min", "_max")):
            buffer.copy_((1 + 2 * drawn) * (-1 if name.endswith("_min") else 1))
        elif name.endswith(("std_scale", "std_bias")):
            buffer.copy_(0.5 + drawn)


def make(family: str, seed: int, place: Path) -> str:
    """Write one checkpoint; return what was refused, or nothing."""
    draw = Draw(f"{family} {seed}")
    config = FAMILIES[family](draw)
    try:
        plain = AutoConfig.for_model(**json.loads(json.dumps(config)))
        kind = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForImageTextToText.from_config(plain, **kind).eval()
    except Exception as error:  # combinations that transformers refuses
        return f"{type(error).__name__}: {error}"
    randomize(model, torch.Generator().manual_seed(seed))
    limit(model, torch.Generator().manual_seed(seed))
    model.tie_weights()
    side = config["vision_config"].get("image_size", 0)
    full = json.loads(model.config.to_json_string(use_diff=False))
    pictures = tuple((draw.randrange(1, 5), draw.randrange(1, 6)) for _ in range(draw.choice([1, 2, 2, 3])))
    served = [(7, 10)] if family == "gemma4" else pictures[:1]  # Gemma 4 enlarges pictures to 70 tokens
    try:
        expected = answer(model, lambda number: Case(full, seed * 100 + number, pictures=pictures))
        asked = {"pictures": served, "has_video": False, "around": [PARAGRAPH] * (family == "gemma3")}
        request = answer(model, lambda number: Case(full, seed * 100 + number, **asked))
    except Exception as error:  # shapes that transformers cannot compute
        return f"{type(error).__name__}: {error}"
    if expected is None or request is None:
        return "no prompt with a clear answer"
    model.save_pretrained(place)
    if draw.flag():  # keep the file as somebody wrote it, instead of with every option
        (place / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}, indent=1))
    encoder = full["vision_config"]
    settings = {name: encoder[key] for name, key in PROCESSOR.items() if key in encoder}
    if "spatial_merge_size" in full:
        settings["merge_size"] = full["spatial_merge_size"]
    settings |= PLAIN_SCALE if family == "gemma4" else SCALE_OF_PIXELS
    settings |= {"gemma4": {"max_soft_tokens": 70}, "gemma3": {"size": {"height": side, "width": side}}}.get(family, ANY_SIZE)
    (place / "preprocessor_config.json").write_text(json.dumps(settings))
    write_tokenizer(place, full["text_config"]["vocab_size"], family)
    (place / "expected.json").write_text(json.dumps(expected | {"request": request}))
    return ""


def answer(model: Any, cases: Callable[[int], Case]) -> Config | None:
    """Return the prompt and the answer of the first case with a clear one."""
    for number in range(20):
        case = cases(number)
        found = case.answered(model)
        is_clear = all(top[0][1] - top[1][1] >= MARGIN for top in found["top_logprobs"])
        if is_clear and not MEDIA_TOKENS & {*found["greedy_token_ids"]}:
            return {"prompt_token_ids": case.prompt, "units": case.units, **found}
    return None


def write_tokenizer(place: Path, vocab_size: int, family: str) -> None:
    """Write a vocabulary of numbers, and a template that writes the text, and for a picture what those of the family write: the
    engine adds the END after rows, and all but START for Gemma 3."""
    names = {number: f"<{number}>" for number in range(vocab_size)} | {
        make_seeing.BREAK: "[IMG_BREAK]",
        make_seeing.END: "[IMG_END]",
    }
    if family == "gemma3":
        names[PARAGRAPH] = "\n\n"
    added = [
        {"id": number, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, name in names.items()
    ]
    model = {"type": "WordLevel", "vocab": {name: number for number, name in names.items()}, "unk_token": "<0>"}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    (place / "tokenizer.json").write_text(json.dumps({"version": "1.0", **parts, "added_tokens": added, "model": model}))
    count = {"gemma3": 1, "mistral3": 2, "llava": 2}.get(family, 3)
    picture = "".join(names[token] for token in (make_seeing.START, make_seeing.IMAGE, make_seeing.END)[:count])
    template = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
        + picture
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    decoder = {str(number): {"content": name, "special": True} for number, name in names.items()}
    (place / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder, "chat_template": template}))


if __name__ == "__main__":
    random_shapes.main(FAMILIES, make)
