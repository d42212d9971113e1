"""Runs every family of models with the features that all should have, and prints a table of what works:

python -m tests.workers.variants.check_features [--family NAME ...] [--feature NAME ...]

A small checkpoint with random weights of each family is served: with an adapter on every linear that one may change, beside
merged weights; from quantized files, beside the numbers that they represent; on two ranks with an adapter, and with experts on
two ranks that move before every step, also with an adapter, beside one rank; with drafts of its MTP layers, beside none;
by an engine of two ranks, with an answer that is one of two choices.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from engine.checkpoint.adapters.layout import AdapterLayout
from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from engine.errors import TokamakError
from tests.adapters import answer, linears_of, merge, write_adapter
from tests.e2e.engine_process import EngineProcess
from tests.paths import DRAWN, GOLDEN
from tests.workers.checkpoints import drawn_tensors, to_gpt_oss_layout, with_joined, write_checkpoint, write_safetensors
from tests.workers.mtp import drafting, write_with_layers
from tests.workers.rank_group.serving import serve, serve_all
from tests.workers.rank_group.test_expert_parallel import answers_of, placements_of
from tests.workers.rank_group.test_tensor_parallel import on_each
from tests.workers.serving import make_runner
from tests.workers.weights.formats.quantizers import (
    Format,
    awq,
    fp8_blocks,
    gptq,
    int_quantized,
    pack_quantized,
    write_quantized,
)

TOLERANCE = 1e-3
REFERENCE: dict[str, Any] = {"ops": "reference", "plan": "eager"}  # computes with the numbers as they are
SIZES = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96}
OTHER_SIZES = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32}
OTHER_SIZES |= {"mamba_num_heads": 8, "num_heads": 8, "moe_shared_expert_intermediate_size": 32}
OTHER_SIZES |= {"intermediate_size_mlp": 96, "q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 16}
QUANTIZED: dict[str, Callable[[], Format]] = {
    "awq": lambda: awq(32),
    "gptq": lambda: gptq(4, 32, is_symmetric=False),
    "packed": lambda: pack_quantized(4, 32),
    "int8": lambda: int_quantized(-1),
    "fp8": lambda: fp8_blocks(32, 32),
}


class Nothing(Exception):
    """The family has no such part."""


def configs() -> dict[str, dict[str, Any]]:
    """Return a config.json of each family of text models, by its name."""
    stored = json.loads((DRAWN / "variants.json").read_text())
    found = {}
    for variant in stored.values():
        config = {name: value for name, value in variant["config"].items() if name != "quantization_config"}
        found.setdefault(config["model_type"], config)
    for path in sorted(GOLDEN.glob("*/config.json")):
        config = json.loads(path.read_text())
        if "vision_config" not in config:
            found.setdefault(config["model_type"], config)
    sized = {}
    for name, config in found.items():
        sizes = {key: value for key, value in (SIZES | OTHER_SIZES).items() if key in config}
        sized[name] = {**config, **sizes, "num_attention_heads": 4}
        sized[name]["num_key_value_heads"] = 4 if "kv_lora_rank" in config else 2
        if "vocab_size_per_layer_input" in config:
            sized[name]["vocab_size_per_layer_input"] = SIZES["vocab_size"]
    return sized


def random_adapter(folder: Path, model: ModelConfig, place: Path) -> Path:
    """Write an adapter of every linear of the checkpoint at `place` that may have one."""
    targets = {name.rpartition(".")[2] for name, _, _ in linears_of(AdapterLayout.of(model, 1, 8))}
    return write_adapter(folder / "adapter", place, targets=targets, size=0.02)


def adapter(config: dict[str, Any], folder: Path) -> None:
    model = write_checkpoint(folder / "model", config)
    own = random_adapter(folder, model, folder / "model")
    merged = make_runner(merge(folder / "merged", folder / "model", own))
    runner = make_runner(folder / "model", adapters=[own])
    for prompt in ([*range(3, 40)], [5, 9]):
        expected, found, base = answer(merged, prompt, -1), answer(runner, prompt, 0), answer(runner, prompt, -1)
        assert found[0] == expected[0], "tokens differ from those of merged weights"
        np.testing.assert_allclose(found[1], expected[1], atol=TOLERANCE)
        assert found != base, "the adapter changes nothing"


def quantized(name: str, config: dict[str, Any], folder: Path) -> None:
    model = write_checkpoint(folder / "plain", config)
    tensors = with_joined(drawn_tensors(model), model, config)
    (folder / "quantized").mkdir()
    worth = write_quantized(folder / "quantized", config, tensors, QUANTIZED[name]())
    assert any((worth[each] != tensors[each]).any() for each in tensors if re.search(r"\.(mlp|mamba)\.", each)), (
        "no part is quantized"
    )
    if model.architecture == "gpt_oss":
        worth = to_gpt_oss_layout(worth, is_packed=False)
    write_safetensors(folder / "plain" / "model.safetensors", worth, metadata={"format": "pt"})
    found, expected = (serve(folder / each, REFERENCE) for each in ("quantized", "plain"))
    assert found == expected, "answers differ from those of the numbers in the file"
    serve(folder / "quantized", {})


def ranks(config: dict[str, Any], folder: Path) -> None:
    model = write_checkpoint(folder / "model", config)
    job = folder / "model", {"adapters": [random_adapter(folder, model, folder / "model")]}
    expected = serve(*job)
    assert on_each(2, serve_all, [job]) == [[expected]] * 2, "answers differ from those of one rank"


def experts(config: dict[str, Any], folder: Path) -> None:
    model = write_checkpoint(folder / "model", config)
    if model.experts is None:
        raise Nothing
    path, options = folder / "model", {"adapters": [random_adapter(folder, model, folder / "model")]}
    expected, placements = serve(path, options), placements_of(path, 2, 1 if model.experts.num_experts % 2 else 2)
    options["weight_cache_dir"] = str(folder)
    found = answers_of(2, path, placements, options, is_one=True)
    assert found == [expected] * 2, "answers differ from those of one rank"
    found = answers_of(2, path, placements, options, is_one=False)
    assert found == [expected[0::2], expected[1::2]], "answers of replicas differ from those of one rank"


def drafts(config: dict[str, Any], folder: Path) -> None:
    if FAMILIES[config["model_type"]].draft_names is None:
        raise Nothing
    write_with_layers(folder, config)
    assert serve(folder, {"speculative_config": drafting(3)})[:-1] == serve(folder, {}), "drafts change the answers"


def served(config: dict[str, Any], folder: Path) -> None:
    """Serve on two ranks, with the experts divided among them; the answer is one of two choices."""
    model = write_checkpoint(folder, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDEN / "llama" / name, folder / name)
    options = ["--dtype", "float32", "--kv-cache-memory", "16MiB", "--no-weight-cache", "--tensor-parallel-size", "2"]
    options += ["--threads", "1", *(["--enable-expert-parallel", "--enable-eplb"] if model.experts else [])]
    body = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}
    with EngineProcess(folder, *options) as engine:
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in ("yes", "no"), answer.text


FEATURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "adapter": adapter,
    **{name: (lambda config, folder, name=name: quantized(name, config, folder)) for name in QUANTIZED},
    "ranks": ranks,
    "experts": experts,
    "drafts": drafts,
    "served": served,
}


def outcome(feature: str, config: dict[str, Any]) -> str:
    """Return "yes", "-" if there is nothing to have it, or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            FEATURES[feature](config, Path(folder))
        except Nothing:
            return "-"
        except TokamakError as error:
            return f"refused: {error}"
        except Exception:
            return traceback.format_exc(limit=-2)
    return "yes"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--feature", nargs="+", default=list(FEATURES), choices=list(FEATURES))
    options = parser.parse_args()
    num_failed = 0
    print("family".ljust(20), *(name.rjust(8) for name in options.feature))
    for name, config in configs().items():
        if options.family and name not in options.family:
            continue
        found = {feature: outcome(feature, config) for feature in options.feature}
        wrong = {feature: text for feature, text in found.items() if text not in ("yes", "-")}
        print(name.ljust(20), *("NO".rjust(8) if each in wrong else found[each].rjust(8) for each in found), flush=True)
        for feature, text in wrong.items():
            print(f"    {feature}: {text}", flush=True)
        num_failed += len(wrong)
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
