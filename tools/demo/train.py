"""Make the demonstration model: data, tokenizer, training, examination, checkpoint. Needs torch; nothing else here does.

    python -m tools.demo.train

Run by hand, on a CPU, when the data or the facts change. It writes `tools/demo/model/` and prints the held-out accuracy
of each task, measured on the checkpoint as read back from disk.

The matrices are trained with Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), which needs about half
the samples that AdamW needs here; embeddings and norms are trained with AdamW.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from tools.demo import data
from tools.demo.vocabulary import END_OF_TEXT, TURN_END, TURN_START, make_tokenizer

MODEL_FOLDER = Path(__file__).parent / "model"
MAX_POSITION_EMBEDDINGS = 2048
IGNORED = -100

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string %}{{ content }}{% elif content %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{ text_of(messages[0]['content']) + '\\n\\n' }}{% endif %}
{{- 'You may call these functions:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\\n' + text_of(message['content']) }}
{%- for call in message['tool_calls'] or [] %}{{ '\\n' + (call['function'] | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model, under the names that config.json gives them."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class Attention(nn.Module):
    """Grouped-query attention with a norm on each query and key head, as in Qwen3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_attention_heads * shape.head_dim
        key_value_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """`hidden` [rows, tokens, hidden], `mask` [rows, 1, tokens, tokens], true where a query may look at a key."""
        rows, tokens, _ = hidden.shape
        heads = (rows, tokens, -1, self.shape.head_dim)
        query = _rotated(self.q_norm(self.q_proj(hidden).view(heads)).transpose(1, 2), rotation)
        key = _rotated(self.k_norm(self.k_proj(hidden).view(heads)).transpose(1, 2), rotation)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        num_queries_per_key = self.shape.num_attention_heads // self.shape.num_key_value_heads
        key = key.repeat_interleave(num_queries_per_key, dim=1)
        value = value.repeat_interleave(num_queries_per_key, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


class Mlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Qwen3(nn.Module):
    """The network; the names of its parameters are those of a Hugging Face Qwen3 checkpoint, less the "model." in front."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        for name, parameter in self.layers.named_parameters():
            if parameter.ndim == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 2 * shape.num_hidden_layers if is_output else 1
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1] * scale))

    def forward(self, token_ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
        """Logits [wanted, vocabulary] at the flat positions `wanted` of `token_ids` [rows, tokens]."""
        hidden = self.embed_tokens(token_ids)
        rotation = self._rotation(token_ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, rotation, mask)
        return self.norm(hidden.flatten(0, 1)[wanted]) @ self.embed_tokens.weight.T

    def _rotation(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        size = self.shape.head_dim
        frequencies = self.shape.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(num_tokens, dtype=torch.float32), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal by a Newton-Schulz iteration; matrices of one shape are done in one batch."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in by_shape.items():
                updates = []
                for matrix in matrices:
                    velocity = self.state[matrix].setdefault("velocity", torch.zeros_like(matrix))
                    velocity.lerp_(matrix.grad, 1 - group["momentum"])
                    updates.append(torch.lerp(matrix.grad, velocity, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, update in zip(matrices, _orthogonal(torch.stack(updates)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=scale)


def _orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices [n, rows, columns] with singular values of about 1, by five Newton-Schulz steps."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    work = matrices.mT if is_tall else matrices
    work = work / (work.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = work @ work.mT
        work = 3.4445 * work + (-4.7750 * square + 2.0315 * square @ square) @ work
    return work.mT if is_tall else work


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows: tokens, the token wanted after each (or `IGNORED`), and the number of the text each belongs to."""

    token_ids: Tensor
    targets: Tensor
    texts: Tensor


def rendered(messages: list[data.Message]) -> str:
    """A finished conversation exactly as the chat template shows it."""
    return "".join(f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in messages)


def _chat_targets(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """For each token the next one where that is part of an assistant's answer, else `IGNORED`."""
    turn_start, turn_end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
    assistant = tokenizer.token_to_id("assistant")
    targets = [IGNORED] * len(token_ids)
    is_answer = False
    for place in range(2, len(token_ids) - 1):
        if token_ids[place - 2] == turn_start and token_ids[place - 1] == assistant:
            is_answer = True
        if is_answer:
            targets[place] = token_ids[place + 1]
            is_answer = token_ids[place + 1] != turn_end
    return targets


def _equation_targets(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """For each token the next one where that is part of a result or ends its line, else `IGNORED`."""
    equals, line_end = tokenizer.encode(" =\n").ids
    targets = [IGNORED] * len(token_ids)
    is_result = False
    for place in range(len(token_ids) - 1):
        is_result |= token_ids[place] == equals
        if is_result:
            targets[place] = token_ids[place + 1]
            is_result = token_ids[place + 1] != line_end
    return targets


def training_texts(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and targets, without end: eight conversations, then a text of equations, and so on."""
    for part in range(1_000_000):
        part_seed = 1_000_000 * seed + part + 1
        chats = tokenizer.encode_batch(list(map(rendered, data.training_conversations(part_seed, 2000))))
        equations = tokenizer.encode_batch(list(data.training_equations(part_seed, 250, num_equations=9)))
        for number, chat in enumerate(chats):
            yield chat.ids, _chat_targets(chat.ids, tokenizer)
            if number % 8 == 7:
                token_ids = equations[number // 8].ids
                yield token_ids, _equation_targets(token_ids, tokenizer)


Row = tuple[list[int], list[int], list[int]]
"""Tokens, targets and the number of the text, for each token of a row under construction."""


def training_batches(tokenizer: Tokenizer, seed: int, num_rows: int, row_tokens: int) -> Iterator[Batch]:
    """Endless batches of fresh texts, each cut to a row and packed into the first row that has room for it."""
    pad = tokenizer.token_to_id(END_OF_TEXT)
    assert pad is not None
    rows: list[Row] = [([], [], []) for _ in range(num_rows)]
    for number, (token_ids, targets) in enumerate(training_texts(tokenizer, seed)):
        num_tokens = min(len(token_ids), row_tokens)
        row = next((row for row in rows if len(row[0]) + num_tokens <= row_tokens), None)
        if row is None:
            yield _batch(rows, row_tokens, pad)
            rows = [([], [], []) for _ in range(num_rows)]
            row = rows[0]
        row[0].extend(token_ids[:num_tokens])
        row[1].extend(targets[:num_tokens])
        row[2].extend([number] * num_tokens)


def _batch(rows: list[Row], row_tokens: int, pad: int) -> Batch:
    fillers = (pad, IGNORED, -1)
    arrays = [np.full((len(rows), row_tokens), filler, dtype=np.int64) for filler in fillers]
    for place, row in enumerate(rows):
        for array, values in zip(arrays, row, strict=True):
            array[place, : len(values)] = values
    return Batch(*(torch.from_numpy(array) for array in arrays))


def loss_of(network: Qwen3, batch: Batch) -> Tensor:
    """Mean cross entropy over the answer tokens; a token sees only its own text."""
    num_tokens = batch.token_ids.shape[1]
    same = batch.texts[:, None, :, None] == batch.texts[:, None, None, :]
    mask = same & torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    targets = batch.targets.flatten()
    wanted = torch.nonzero(targets != IGNORED).squeeze(1)
    return functional.cross_entropy(network(batch.token_ids, mask, wanted), targets[wanted])


@torch.no_grad()
def replies(network: Qwen3, tokenizer: Tokenizer, questions: list[data.Question], max_new_tokens: int = 80) -> list[str]:
    """Greedy answers, 64 questions of similar length at a time, without a KV cache."""
    turn_end = tokenizer.token_to_id(TURN_END)
    texts = [rendered([{"role": "user", "content": question.text}]) + f"{TURN_START}assistant\n" for question in questions]
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
    return [tokenizer.decode(answer) for answer in answers]


def examine(network: Qwen3, tokenizer: Tokenizer, num_per_task: int, seed: int = 1) -> dict[str, float]:
    """The share of held-out questions answered right, by task. Prints some wrong answers."""
    accuracy = {}
    for task in (*data.ARITHMETIC_TASKS, *data.OTHER_TASKS, "unknown"):
        questions = data.held_out_questions((task,), min(num_per_task, 60) if task == "unknown" else num_per_task, seed)
        answers = replies(network, tokenizer, questions)
        wrong = [pair for pair in zip(questions, answers, strict=True) if not data.is_correct(*pair)]
        accuracy[task] = 1 - len(wrong) / len(questions)
        for question, answer in wrong[:4]:
            print(f"    wrong: {question.text!r} -> {answer!r}, not {question.answer!r}")
    print("  " + "  ".join(f"{task} {100 * share:.1f}%" for task, share in accuracy.items()), flush=True)
    return accuracy


def _learning_rate_share(step: int, progress: float) -> float:
    """Warm-up over 100 steps, full rate for half of the run, then a straight line down to zero."""
    return min(1.0, step / 100, 2 * (1 - progress))


@dataclass(frozen=True, slots=True)
class Run:
    """How long and with what to train. `max_minutes` cuts a run short on a slow or busy machine."""

    num_steps: int
    max_minutes: float
    learning_rate: float
    num_rows: int
    row_tokens: int
    seed: int
    num_threads: int
    folder: Path


def _add_gradients(network: Qwen3, batch: Batch, lock: Lock, share: float) -> float:
    """Add `share` times the gradients of a batch to the parameters' and return its loss."""
    parameters = list(network.parameters())
    loss = loss_of(network, batch)
    gradients = torch.autograd.grad(loss, parameters)
    with lock:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(gradient, alpha=share)
    return loss.item()


def train(network: Qwen3, tokenizer: Tokenizer, run: Run) -> None:
    """Train, printing speed, loss and the time left, and saving now and then.

    The learning rate follows the steps or the clock, whichever is further. Each thread takes whole rows, so that threads
    meet once in a step; on a busy machine that is several times faster than torch's threads, which meet in every operation.
    """
    matrices = [parameter for parameter in network.layers.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in network.parameters() if parameter.ndim == 1]
    optimizers = {
        Muon(matrices, lr=0.0): run.learning_rate,
        torch.optim.AdamW([network.embed_tokens.weight, *vectors], betas=(0.9, 0.98), weight_decay=0.0): run.learning_rate / 5,
    }
    batches = training_batches(tokenizer, run.seed, run.num_rows // run.num_threads, run.row_tokens)
    tokens_per_step = run.num_rows * run.row_tokens
    threads = ThreadPoolExecutor(run.num_threads, initializer=torch.set_num_threads, initargs=(1,))
    lock = Lock()
    begin = time.monotonic()
    mean_loss, progress, step = 0.0, 0.0, 0
    while progress < 1:
        step += 1
        share = 1 / run.num_threads
        pending = [threads.submit(_add_gradients, network, next(batches), lock, share) for _ in range(run.num_threads)]
        losses = [part.result() for part in pending]
        for optimizer, full_rate in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = full_rate * _learning_rate_share(step, progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        mean_loss += (sum(losses) / len(losses) - mean_loss) / min(step, 50)
        minutes = (time.monotonic() - begin) / 60
        progress = max(step / run.num_steps, minutes / run.max_minutes)
        if step % 50 == 0:
            speed, left = step * tokens_per_step / minutes / 60, minutes / progress - minutes
            print(f"step {step}  {progress:.1%}  loss {mean_loss:.4f}  {speed:.0f} tokens/s  {left:.1f} min left", flush=True)
        if step % 500 == 0:
            save(network, tokenizer, run.folder)
        if step % 1000 == 0 and progress < 1:
            examine(network, tokenizer, num_per_task=40, seed=step)
    print(f"trained for {step} steps, {step * tokens_per_step} tokens, {minutes:.1f} minutes", flush=True)
    save(network, tokenizer, run.folder)


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
    generation = {"do_sample": False, "eos_token_id": end_id, "pad_token_id": pad_id}
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
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path) -> tuple[Qwen3, Tokenizer]:
    """Read back what `save` wrote."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: config[name] for name in Shape.__slots__ if name != "rope_theta"}
    network = Qwen3(Shape(**sizes, rope_theta=config["rope_parameters"]["rope_theta"]))
    tensors = load_file(folder / "model.safetensors")
    network.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return network, Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--max-minutes", type=float, default=60.0, help="of training; fewer steps on a slow machine")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of Muon; AdamW takes a fifth")
    parser.add_argument("--rows", type=int, default=32, help="rows in a batch")
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the data")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint that is there; give another seed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--examine-only", action="store_true", help="examine the checkpoint that is there")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    if not options.examine_only:
        if options.resume:
            network, tokenizer = load(options.model)
        else:
            tokenizer = make_tokenizer()
            network = Qwen3(Shape(vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=options.layers))
        num_parameters = sum(parameter.numel() for parameter in network.parameters())
        print(f"{num_parameters} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
        run = Run(
            num_steps=options.steps,
            max_minutes=options.max_minutes,
            learning_rate=options.learning_rate,
            num_rows=options.rows,
            row_tokens=options.row_tokens,
            seed=options.seed,
            num_threads=options.threads,
            folder=options.model,
        )
        train(network, tokenizer, run)
    examine(*load(options.model), num_per_task=300)


if __name__ == "__main__":
    main()
