"""Write and read the demonstration model as a Hugging Face checkpoint. Called by `train.py` and `examine.py`."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from tools.demo.drafts import Drafts
from tools.demo.network import Qwen3, Shape
from tools.demo.template import CHAT_TEMPLATE
from tools.demo.vocabulary import END_OF_TEXT, TURN_END

MAX_POSITION_EMBEDDINGS = 2048
TRUNK_FILE, DRAFTS_FILE = "model.safetensors", "model-mtp.safetensors"


def save(network: Qwen3, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face checkpoint: config, weights in float32, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = asdict(network.shape)
    end_id, pad_id = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": end_id,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * network.shape.num_hidden_layers,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "max_window_layers": network.shape.num_hidden_layers,
        "model_type": "qwen3",
        "pad_token_id": pad_id,
        "rope_parameters": {"rope_theta": shape.pop("rope_theta"), "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        **shape,
    }
    generation = {"do_sample": False, "eos_token_id": end_id, "pad_token_id": pad_id, "temperature": 0.0}
    tokenizer_config = {
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    contents = (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer_config))
    for name, content in contents:
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = {f"model.{name}": tensor.detach().contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, folder / TRUNK_FILE, metadata={"format": "pt"})
    (folder / TRUNK_FILE).chmod(0o644)


def save_drafts(drafts: Drafts, folder: Path) -> None:
    """Add draft layers to the checkpoint in `folder`: a separate file, and an index with both."""
    tensors = {f"mtp.{name}": tensor.detach().contiguous() for name, tensor in drafts.state_dict().items()}
    save_file(tensors, folder / DRAFTS_FILE, metadata={"format": "pt"})
    (folder / DRAFTS_FILE).chmod(0o644)
    files = dict.fromkeys(load_file(folder / TRUNK_FILE), TRUNK_FILE) | dict.fromkeys(tensors, DRAFTS_FILE)
    num_bytes = sum(tensor.nbytes for file in (TRUNK_FILE, DRAFTS_FILE) for tensor in load_file(folder / file).values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": len(drafts.layers)}
    for name, content in (("model.safetensors.index", index), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def load_drafts(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights added by `save_drafts`, by their names in `Drafts`."""
    return {name.removeprefix("mtp."): tensor for name, tensor in load_file(folder / DRAFTS_FILE).items()}


def grown(network: Qwen3, tokenizer: Tokenizer, new_tokenizer: Tokenizer, num_layers: int) -> Qwen3:
    """Return `network` with the vocabulary of `new_tokenizer` and `num_layers` layers; for old tokens it answers as before.

    A new token starts as the mean of the tokens that spelled it. New layers are inserted from the second on and start without
    effect.
    """
    shape = replace(network.shape, vocab_size=new_tokenizer.get_vocab_size(), num_hidden_layers=num_layers)
    result = Qwen3(shape)
    num_new = num_layers - network.shape.num_hidden_layers
    for place, layer in enumerate(result.layers):
        if 1 <= place <= num_new:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        else:
            layer.load_state_dict(network.layers[place if place == 0 else place - num_new].state_dict())
    result.norm.load_state_dict(network.norm.state_dict())
    old_ids = tokenizer.get_vocab()
    with torch.no_grad():
        for token, token_id in new_tokenizer.get_vocab().items():
            parts = [old_ids[token]] if token in old_ids else [old_ids[symbol] for symbol in token]
            result.embed_tokens.weight[token_id] = network.embed_tokens.weight[parts].mean(0)
    return result


def load(folder: Path) -> tuple[Qwen3, Tokenizer]:
    """Read back what `save` wrote."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: config[name] for name in Shape.__slots__ if name != "rope_theta"}
    network = Qwen3(Shape(**sizes, rope_theta=config["rope_parameters"]["rope_theta"]))
    tensors = load_file(folder / TRUNK_FILE)
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return network, Tokenizer.from_file(str(folder / "tokenizer.json"))
