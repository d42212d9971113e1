"""Answers of other programs, computed in an environment that has them: reads a question as JSON, prints the answer as JSON.

python tests/real_models/reference.py QUESTION < texts.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

NUM_TOKENS = 32
NUM_BEST = 20  # log-probabilities of each step


def greedy(model: str, texts: list[str]) -> list[dict[str, Any]]:
    """Return of each text llama.cpp's tokens, those that it continues with, and the best log-probabilities at each step."""
    import numpy as np
    from llama_cpp import Llama

    llama = Llama(model, n_ctx=1024, logits_all=True, verbose=False, n_threads=1)
    found = []
    for text in texts:
        prompt = llama.tokenize(text.encode(), add_bos=True, special=True)
        llama.reset()
        tokens, best, new = [], [], prompt
        for _ in range(NUM_TOKENS):
            llama.eval(new)
            best.append(best_of(np.array(llama.scores[llama.n_tokens - 1], np.float64)))
            new = [best[-1][0][0]]
            tokens += new
        found.append({"prompt": prompt, "tokens": tokens, "best": best})
    return found


def best_of(logits: Any) -> list[tuple[int, float]]:
    """Return the best tokens and their log-probabilities."""
    import numpy as np

    logprobs = logits - np.logaddexp.reduce(logits)
    return [(int(index), float(logprobs[index])) for index in np.argsort(-logprobs)[:NUM_BEST]]


def exact(model: str, cases: list[dict[str, Any]]) -> list[list[list[tuple[int, float]]]]:
    """Return the best log-probabilities at each step of llama.cpp's answers, in float64 with the weights as they are stored."""
    import torch
    from transformers import AutoModelForCausalLM

    decoder, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval(), []
    for case in cases:
        with torch.no_grad():
            logits = decoder(torch.tensor([case["prompt"] + case["tokens"][:-1]])).logits[0, len(case["prompt"]) - 1 :]
        found.append([best_of(row) for row in logits.numpy()])
    return found


def embeddings(model: str, texts: list[str]) -> list[list[float]]:
    """Return the normalized means of a sentence encoder's hidden states."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    found = []
    for text in texts:
        with torch.no_grad():
            hidden = encoder(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256)).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).tolist())
    return found


def tokens(model: str, texts: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text)["input_ids"] for text in texts]


def chats(model: str, conversations: list[list[dict[str, str]]]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        for conversation in conversations
    ]


if __name__ == "__main__":
    answer = {each.__name__: each for each in (greedy, exact, embeddings, tokens, chats)}[sys.argv[1]]
    json.dump(answer(sys.argv[2], json.load(sys.stdin)), sys.stdout)
