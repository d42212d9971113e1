"""Answers of other programs, computed in an environment that has them: reads a question as JSON, prints the answer as JSON.

python tests/real_models/reference.py QUESTION < texts.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

NUM_TOKENS = 32


def greedy(model: str, texts: list[str]) -> list[dict[str, Any]]:
    """Return of each text llama.cpp's tokens, the tokens that it continues with, and the log-probabilities of the best two at
    each step."""
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
            logits = np.array(llama.scores[llama.n_tokens - 1], np.float64)
            logprobs = logits - np.logaddexp.reduce(logits)
            order = np.argsort(-logprobs)[:2]
            best.append([[int(index), float(logprobs[index])] for index in order])
            new = [int(order[0])]
            tokens += new
        found.append({"prompt": prompt, "tokens": tokens, "best": best})
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
    answer = {each.__name__: each for each in (greedy, embeddings, tokens, chats)}[sys.argv[1]]
    json.dump(answer(sys.argv[2], json.load(sys.stdin)), sys.stdout)
