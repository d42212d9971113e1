"""The draft layer of the demonstration model (multi-token prediction), in torch, and its training loss.

Called by `train.py --mtp`. The layer has Qwen3-Next's names (`mtp.*`) and computes the same as the engine
(`workers/models/mtp.py`): from token j and the trunk's hidden state before it, a hidden state from which the trunk's head
predicts token j + 1; the next prediction uses the predicted token and that hidden state.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo.batches import IGNORED, Batch
from tools.demo.network import DecoderLayer, Qwen3, Shape, draw_matrices, rotation


class Drafts(nn.Module):
    """Draft layer; parameters are named as in the checkpoint, without "mtp."."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.pre_fc_norm_embedding = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        draw_matrices(self, shape)

    def forward(self, embedded: Tensor, before: Tensor, texts: Tensor, wanted: list[Tensor]) -> list[Tensor]:
        """Return for each unrolled draft token the hidden states [wanted, hidden] at the flat positions `wanted` of its tokens.
        `embedded` [rows, tokens, hidden], `before` likewise: the trunk's hidden state of the token before. The d-th draft token
        after the token at p sees entries of the trunk's hidden states up to p, and of the draft tokens before it."""
        layer, num_tokens = self.layers[0], embedded.shape[1]
        turns = rotation(self.shape, num_tokens)
        of_token = self.pre_fc_norm_embedding(embedded)
        places = torch.arange(num_tokens)
        distance = places[:, None] - places[None, :]
        same = texts[:, None, :, None] == texts[:, None, None, :]
        has_entry = functional.pad(texts[:, 1:] == texts[:, :-1], (1, 0))[:, None, None, :]  # not the first of a text
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for number, positions in enumerate(wanted):
            entered = self.fc(torch.cat((of_token, self.pre_fc_norm_hidden(before)), dim=-1))
            query, key, value = layer.self_attn.projected(layer.input_layernorm(entered), turns)
            keys.append(key)
            values.append(value)
            masks = [same & has_entry & (distance >= number)]
            masks += [(distance == number - guess).expand(same.shape) for guess in range(1, number + 1)]
            masks[-1] = masks[-1] | (distance == 0)  # itself: a row must not be fully masked
            mixed = layer.self_attn.mixed(query, torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 3))
            attended = entered.flatten(0, 1)[positions] + layer.self_attn.o_proj(mixed.flatten(0, 1)[positions])
            found.append(self.norm(layer.behind_attention(attended)))
            flat = before.new_zeros(texts.numel() + 1, self.shape.hidden_size).index_copy(0, positions + 1, found[-1])
            before = flat[:-1].view(before.shape)
        return found


@torch.no_grad()
def _trunk(network: Qwen3, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the trunk's hidden states [rows, tokens, hidden] and greedy tokens [rows, tokens], `IGNORED` where no target
    exists.

    A text counts only as long as it equals the trunk's greedy output: everything after its first difference is ignored.
    """
    mask = batch.mask()
    hidden = network.norm(network.residual(batch.token_ids, mask))
    is_wanted = batch.targets != IGNORED
    choices = torch.full_like(batch.targets, IGNORED)
    choices[is_wanted] = (hidden[is_wanted] @ network.embed_tokens.weight.T).argmax(dim=-1)
    is_other = (choices != batch.targets)[:, None, None, :]
    is_behind = (mask & is_other).sum(dim=3).squeeze(1) > (choices != batch.targets)
    return hidden, choices.masked_fill(is_behind, IGNORED)


def guesses(network: Qwen3, drafts: Drafts, num_unrolled: int, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Return for each unrolled draft token its logits [n, vocabulary] and the trunk's choices [n]."""
    hidden, choices = _trunk(network, batch)
    before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
    is_chosen = choices != IGNORED
    is_asked = is_chosen & functional.pad(is_chosen[:, :-1], (1, 0))  # by an answer's tokens, the first of which has no draft
    wanted = []
    for _ in range(num_unrolled):
        wanted.append(torch.nonzero(is_asked.flatten()).squeeze(1))
        is_asked = is_chosen & functional.pad(is_asked[:, :-1], (1, 0))
    found = drafts(network.embed_tokens(batch.token_ids), before, batch.texts, wanted)
    head = network.embed_tokens.weight
    flat = choices.flatten()
    return [(states @ head.T, flat[positions]) for states, positions in zip(found, wanted, strict=True)]


def loss_of(network: Qwen3, drafts: Drafts, num_unrolled: int, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the draft tokens; the first counts most."""
    losses = [functional.cross_entropy(*guess) for guess in guesses(network, drafts, num_unrolled, batch)]
    weights = [0.7**number for number in range(len(losses))]
    return sum((weight * loss for weight, loss in zip(weights, losses, strict=True)), torch.zeros(())) / sum(weights)
