"""Makes `golden.json` of the text models: greedy tokens, the five likeliest of each step and the log-probabilities of short
prompts, computed by transformers in float32.

Run by hand, in an environment of its own (`pip install transformers==5.23.0 torch==2.13.0`):

    python tests/golden/make_text.py                 # all text models, from the weights in their folders
    python tests/golden/make_text.py qwen3 llama     # these alone
    python tests/golden/make_text.py --new NAME      # a new model: NAME/config.json is there, all else is made

NAME is a folder beside this file, or `recurrent/NAME` for a model with recurrent layers. A new model gets random weights (seed
0), links to the tokenizer and chat template of `llama`, and its prompts. The `model_type` is one that transformers knows.
Weights are stored in bfloat16, which halves the files; `dtype` of `config.json` stays as it is. The seed of the weights of the
seven oldest models was not recorded, so their weights stay as they are. What is made from them has the same tokens everywhere;
log-probabilities differ by up to 4e-5 between processors.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, __version__

PLACE = Path(__file__).parent
TEXT_MODELS = sorted(
    str(path.parent.relative_to(PLACE))
    for path in (*PLACE.glob("*/model.safetensors"), *PLACE.glob("recurrent/*/model.safetensors"))
    if path.with_name("golden.json").exists() and not path.with_name("units.npz").exists()  # of models that see
)
SHARED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MAX_PROMPT_LOGPROBS = 64  # longer prompts have none
NUM_GENERATED, NUM_LOGPROBS = 24, 5


def prompts_of(name: str) -> list[list[int]]:
    source = PLACE / name / "golden.json"
    cases = json.loads((source if source.exists() else PLACE / "llama" / "golden.json").read_text())["cases"]
    return [case["prompt_token_ids"] for case in cases]


@torch.inference_mode()
def case_of(model: Any, prompt: list[int]) -> dict[str, Any]:
    tokens, likeliest = list(prompt), []
    for _ in range(NUM_GENERATED):
        logprobs = model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=-1)
        values, token_ids = logprobs[-1].topk(NUM_LOGPROBS)
        likeliest.append(
            [[token_id, round(value, 5)] for token_id, value in zip(token_ids.tolist(), values.tolist(), strict=True)]
        )
        tokens.append(likeliest[-1][0][0])
    case: dict[str, Any] = {"prompt_token_ids": prompt, "greedy_token_ids": tokens[len(prompt) :], "top_logprobs": likeliest}
    if len(prompt) <= MAX_PROMPT_LOGPROBS:
        following = [round(logprobs[place, token].item(), 5) for place, token in enumerate(prompt[1:])]
        case["prompt_logprobs"] = [None, *following]
    return case


def share_files(directory: Path) -> None:
    for file in SHARED_FILES:
        (directory / file).unlink(missing_ok=True)
        (directory / file).symlink_to(os.path.relpath(PLACE / "llama" / file, directory))


def make_checkpoint(name: str) -> None:
    """Write random weights for a `config.json`, and links to the files that all models share."""
    share_files(PLACE / name)
    torch.manual_seed(0)
    options = (PLACE / name / "config.json").read_text()
    config = AutoConfig.from_pretrained(PLACE / name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # as initialised, they are so small that every token is as likely as the next
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(PLACE / name)
    (PLACE / name / "config.json").write_text(options)  # `save_pretrained` names bfloat16 in it


def make_golden(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(PLACE / name, dtype=torch.float32, attn_implementation="eager").eval()
    cases = [case_of(model, prompt) for prompt in prompts_of(name)]
    made_with = f"transformers {__version__}, torch {torch.__version__.partition('+')[0]}, float32"
    (PLACE / name / "golden.json").write_text(json.dumps({"made_with": made_with, "cases": cases}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=TEXT_MODELS)
    parser.add_argument("--new", action="store_true", help="make weights and the other files too, from NAME/config.json")
    arguments = parser.parse_args()
    for name in arguments.names:
        if arguments.new:
            make_checkpoint(name)
        make_golden(name)


if __name__ == "__main__":
    main()
