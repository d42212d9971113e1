"""`tokamak calibrate`: the statistics that it writes, and what it refuses."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ops.weight_format import float32
from tests.engine.tokenizer.vocabularies import vocabulary_of
from tests.workers.checkpoints import TINY, drawn_tensors, write_config, write_safetensors
from tools.calibrate.command import main, pieces_of
from tools.demo import MODEL
from tools.demo.conversations import training_conversations
from workers.weights.safetensors import SafetensorsFile

NUM_TOKENS = 512


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the statistics of the embedded model over conversations, and the text."""
    directory = tmp_path_factory.mktemp("calibrate")
    drawn = (each for each in training_conversations(seed=5) if not each.tools)
    messages = [message for each in islice(drawn, 40) for message in each.messages]
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    (directory / "text.txt").write_text(text)
    output = directory / "statistics.safetensors"
    assert (
        main([str(MODEL), str(directory / "text.txt"), str(output), "--max-tokens", f"{NUM_TOKENS}", "--dtype", "float32"]) == 0
    )
    return output, text


def statistics_of(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in SafetensorsFile(path).tensors.items()}


def test_statistics_are_mean_squares_of_inputs(written: tuple[Path, str]) -> None:
    path, text = written
    tensors = SafetensorsFile(MODEL / "model.safetensors").tensors
    config = json.loads((MODEL / "config.json").read_text())
    ids = [token for piece in pieces_of(text, vocabulary_of(MODEL), 512, NUM_TOKENS) for token in piece]
    x = float32(tensors["model.embed_tokens.weight"].read())[ids].astype(np.float64)
    x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True) + config["rms_norm_eps"])
    expected = np.square(x * tensors["model.layers.0.input_layernorm.weight"].read()).mean(axis=0)
    np.testing.assert_allclose(statistics_of(path)["model.layers.0.self_attn.q_proj"], expected, rtol=1e-4)


def test_experts_have_the_statistics_of_a_dense_layer(tmp_path: Path) -> None:
    """A single expert gets all rows with the weight 1, so its inputs are those of the same layer without experts."""
    vocab_size = len(vocabulary_of(MODEL).pieces)
    dense = {**TINY, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "vocab_size": vocab_size}
    mixed = dense | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    mixed |= {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": dense["intermediate_size"]}
    found = []
    tensors = drawn_tensors(write_config(tmp_path, dense))
    routers = {f"model.layers.{layer}.mlp.gate.weight": np.zeros((1, dense["hidden_size"])) for layer in range(2)}
    for config in (dense, mixed):
        names = {name: name if config is dense else name.replace(".mlp.", ".mlp.experts.0.") for name in tensors}
        stored = {names[name]: tensor for name, tensor in tensors.items()} | (routers if config is mixed else {})
        path = tmp_path / config["model_type"]
        path.mkdir()
        write_config(path, config)
        write_safetensors(path / "model.safetensors", stored)
        for file in MODEL.glob("tokenizer*"):
            (path / file.name).write_bytes(file.read_bytes())
        found.append(statistics_of(calibrated(path, tmp_path)))
    for name, values in found[0].items():
        same = found[1][name.replace(".mlp.", ".mlp.experts.0.")]
        np.testing.assert_allclose(same, values, rtol=1e-4, err_msg=name)


def calibrated(path: Path, directory: Path) -> Path:
    (directory / "text.txt").write_text("one two three four five six seven " * 20)
    assert main([str(path), str(directory / "text.txt"), str(directory / "out.safetensors"), "--dtype", "float32"]) == 0
    return directory / "out.safetensors"


def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("too short")
    binary.write_bytes(b"abc\xff")
    for arguments, text in (
        ([empty, "out"], "the minimum is 32; use a longer text"),
        ([binary, "out"], "is not UTF-8 text: byte 3 is 0xff"),
        ([tmp_path / "none.txt", "out"], "cannot be read: No such file or directory"),
        ([empty, "none/out"], "none/out cannot be written: none is not a directory"),
        ([empty, "out", "--tensor-parallel-size", "2"], "--tensor-parallel-size does not apply"),
    ):
        assert main([str(MODEL), *map(str, arguments)]) == 2
        assert text in capsys.readouterr().err
