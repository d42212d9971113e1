"""Speed of a text model in transformers: a peer of `tokamak bench serve` without HTTP.

Run with an interpreter that has torch and transformers:

    python -m tools.bench.transformers_text MODEL [--dtype bfloat16] [--batch 1,4,16] [--prompt 512,2048] [--tokens 32]

Decoding begins after prompts of 128 tokens. Prompts are random token ids.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PROMPT = 128


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def computed(model: Any, token_ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any, float]:
    """Return the likeliest next tokens, the cache, and the seconds."""
    begin = time.perf_counter()
    found = model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    chosen = found.logits[:, -1:].argmax(-1)
    return chosen, found.past_key_values, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16])
    parser.add_argument("--prompt", type=numbers, default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    with torch.inference_mode():
        for batch in options.batch:
            token_ids, cache, _ = computed(model, torch.randint(3, 1000, (batch, PROMPT)))
            times = []
            for _ in range(options.tokens):
                token_ids, cache, seconds = computed(model, token_ids, cache)
                times.append(seconds)
            print(f"decode c={batch}: {batch / statistics.median(times[2:]):.2f} tok/s", flush=True)
        for length in options.prompt:
            seconds = min(computed(model, torch.randint(3, 1000, (1, length)))[2] for _ in range(2))
            print(f"prefill {length}: {length / seconds:.1f} tok/s", flush=True)


if __name__ == "__main__":
    main()
