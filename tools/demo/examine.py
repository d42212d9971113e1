"""Examine a checkpoint with torch, without a server: `python -m tools.demo.train --examine-only`, and after a training."""

import torch
from tokenizers import Tokenizer

from tools.demo import data
from tools.demo.examination import examination, report
from tools.demo.network import Qwen3
from tools.demo.template import prompt_of
from tools.demo.vocabulary import TURN_END


@torch.no_grad()
def replies(
    network: Qwen3, tokenizer: Tokenizer, questions: list[data.Question], thinks: bool = False, max_new_tokens: int = 128
) -> list[str]:
    """Return greedy answers without reasoning; 64 questions of similar length at a time, without a KV cache."""
    turn_end = tokenizer.token_to_id(TURN_END)
    texts = [prompt_of(question.messages(), question.definitions(), thinks) for question in questions]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    answers: list[list[int]] = [[] for _ in questions]
    order = sorted(range(len(questions)), key=lambda place: len(prompts[place]) + 2 * len(questions[place].answer))
    for begin in range(0, len(order), 64):
        open_places = order[begin : begin + 64]
        for _ in range(max_new_tokens):
            sequences = [prompts[place] + answers[place] for place in open_places]
            longest = max(map(len, sequences))
            token_ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
            wanted = torch.tensor([row * longest + len(sequence) - 1 for row, sequence in enumerate(sequences)])
            mask = torch.ones(longest, longest, dtype=torch.bool).tril()
            chosen = network(token_ids, mask, wanted).argmax(dim=-1).tolist()
            for place, token_id in zip(open_places, chosen, strict=True):
                answers[place].append(token_id)
            open_places = [place for place in open_places if answers[place][-1] != turn_end]
            if not open_places:
                break
    texts = [tokenizer.decode(answer) for answer in answers]
    return [text.partition("</think>\n\n")[2] for text in texts] if thinks else texts


def examine(network: Qwen3, tokenizer: Tokenizer, count: int, seed: int, thinks: bool = False) -> bool:
    """Ask `count` held-out questions of each group of `examination.py` and print the results. Return whether all meet their
    bars."""
    is_good = True
    for group, questions in examination(count, seed):
        is_good &= report(group, questions, replies(network, tokenizer, questions, thinks))
    return is_good
