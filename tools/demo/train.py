"""Make the demonstration model: data, tokenizer, training, examination, checkpoint. Needs torch; nothing else here does.

    python -m tools.demo.train

Run by hand, on a CPU, when the data or the facts change. It writes `tools/demo/model/` and prints the held-out accuracy of each
task, measured on the checkpoint read back from disk. Results depend only on the seed, the number of steps and the number of
threads, not on time.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from tools.demo import drafts
from tools.demo.batches import IGNORED, Batch, Mixture, training_batch
from tools.demo.checkpoint import grown, load, load_drafts, save, save_drafts
from tools.demo.conversations import TOOLS_SHARE
from tools.demo.drafts import Drafts
from tools.demo.examine import examine
from tools.demo.muon import Muon
from tools.demo.network import Qwen3, Shape
from tools.demo.schedule import Schedule
from tools.demo.state import Stateful, keep, restored
from tools.demo.vocabulary import make_tokenizer

MODEL_FOLDER = Path(__file__).parent / "model"
STEPS_BETWEEN_STATES = 50
EMBEDDING = "embed_tokens.weight"
LossOf = Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Run(Schedule):
    """Settings of a training."""

    learning_rate: float
    mixture: Mixture
    seed: int
    num_threads: int


def loss_of(network: Qwen3, batch: Batch) -> Tensor:
    """Return the mean cross entropy over the target tokens."""
    targets = batch.targets.flatten()
    wanted = torch.nonzero(targets != IGNORED).squeeze(1)
    with torch.autocast("cpu", torch.bfloat16):  # only products; a quarter less time on processors that support them
        logits = network(batch.token_ids, batch.mask(), wanted)
    return functional.cross_entropy(logits.float(), targets[wanted])


def _gradients(network: nn.Module, loss_of: LossOf, batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
    loss = loss_of(batch)
    return loss.item(), torch.autograd.grad(loss, list(network.parameters()))


def train(
    network: nn.Module, loss_of: LossOf, layers: Iterable[nn.Module], tokenizer: Tokenizer, run: Run, state_file: Path | None
) -> None:
    """Train, printing speed and loss. With a `state_file`, continue from it and write it now and then. `layers` are compiled.

    Each thread processes whole rows, so threads synchronize once per step; on a busy machine that is several times faster than
    torch's threads, which synchronize in every operation. Gradients are added in a fixed order.
    """
    named = dict(network.named_parameters())
    matrices = [parameter for name, parameter in named.items() if parameter.ndim == 2 and name != EMBEDDING]
    others = [parameter for name, parameter in named.items() if parameter.ndim == 1 or name == EMBEDDING]
    threads = ThreadPoolExecutor(run.num_threads, initializer=torch.set_num_threads, initargs=(1,))
    muon = Muon(matrices, threads)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    stateful: dict[str, Stateful] = {"network": network, "muon": muon, "adamw": adamw}
    first_step = restored(state_file, stateful)
    for layer in layers:
        layer.compile(dynamic=False)
    begin = time.monotonic()
    mean_loss = 0.0
    batch = threads.submit(training_batch, tokenizer, run.seed, first_step, run.mixture)
    for step in range(first_step, run.num_steps + 1):
        pending = [threads.submit(_gradients, network, loss_of, part) for part in batch.result().parts(run.num_threads)]
        batch = threads.submit(training_batch, tokenizer, run.seed, step + 1, run.mixture)
        parts = [part.result() for part in pending]
        for parameter, *gradients in zip(network.parameters(), *(gradients for _, gradients in parts), strict=True):
            parameter.grad = sum(gradients) / len(parts)
        for optimizer, full_rate in ((muon, run.learning_rate), (adamw, run.learning_rate / 5)):
            for group in optimizer.param_groups:
                group["lr"] = full_rate * run.learning_rate_share(step)
            optimizer.step()
        loss = sum(loss for loss, _ in parts) / len(parts)
        mean_loss += (loss - mean_loss) / min(step - first_step + 1, 50)
        if step % 50 == 0:
            speed = (step - first_step + 1) / (time.monotonic() - begin)
            print(f"step {step} of {run.num_steps}  loss {mean_loss:.4f}  {speed:.2f} steps/s", flush=True)
        if state_file and step % STEPS_BETWEEN_STATES == 0:
            keep(state_file, stateful, step)


def train_drafts(options: argparse.Namespace) -> None:
    """Train the draft layer for the existing checkpoint, which is not changed."""
    network, tokenizer = load(options.model)
    network.requires_grad_(False)
    layers = Drafts(network.shape)
    if options.start_from:
        layers.load_state_dict(load_drafts(options.start_from))
    run = run_of(options, chat_share=1.0)
    train(layers, partial(drafts.loss_of, network, layers, options.unrolled), (), tokenizer, run, options.state)
    save_drafts(layers, options.model)


def run_of(options: argparse.Namespace, chat_share: float) -> Run:
    return Run(
        num_steps=options.steps,
        num_decay_steps=options.decay_steps,
        learning_rate=options.learning_rate,
        mixture=Mixture(
            options.rows,
            options.row_tokens,
            chat_share,
            options.tools_share,
            options.openings_share,
            options.choices_share,
            options.declined_share,
        ),
        seed=options.seed,
        num_threads=options.threads,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtp", action="store_true", help="a layer that drafts, beside the checkpoint that is there")
    parser.add_argument("--unrolled", type=int, default=3, help="with --mtp, guesses behind each token")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--decay-steps", type=int, default=2000, help="the last steps, over which the learning rate falls")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of Muon; AdamW takes a fifth")
    parser.add_argument("--rows", type=int, default=16, help="rows in a batch")
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--chat-share", type=float, default=0.7, help="of a row, filled with conversations; equations follow")
    parser.add_argument("--openings-share", type=float, default=0.8, help="of a row, at whose end openings of answers stop")
    parser.add_argument("--choices-share", type=float, default=0.93, help="of a row, at whose end choices of tools stop")
    parser.add_argument("--tools-share", type=float, default=TOOLS_SHARE, help="of the conversations, with tools")
    parser.add_argument(
        "--declined-share", type=float, default=0.0, help="of the facts asked for, declined: at the end, so that doubts are"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the data")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start-from", type=Path, help="checkpoint whose tokenizer and weights are the initial ones")
    parser.add_argument("--new-vocabulary", action="store_true", help="with --start-from, make the tokenizer anew")
    parser.add_argument("--state", type=Path, help="file from which a run that was cut off goes on; written as it goes")
    parser.add_argument("--examine-only", action="store_true", help="examine the checkpoint that is there")
    parser.add_argument("--thinking", action="store_true", help="examine what it says after it thought")
    parser.add_argument("--count", type=int, default=1000, help="questions in each group of the examination")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    if options.mtp:
        train_drafts(options)
        return 0
    if not options.examine_only:
        if options.start_from:
            network, old_tokenizer = load(options.start_from)
            tokenizer = make_tokenizer() if options.new_vocabulary else old_tokenizer
            network = grown(network, old_tokenizer, tokenizer, options.layers)
        else:
            tokenizer = make_tokenizer()
            network = Qwen3(Shape(vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=options.layers))
        num_parameters = sum(parameter.numel() for parameter in network.parameters())
        print(f"{num_parameters} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
        run = run_of(options, options.chat_share)
        train(network, partial(loss_of, network), network.layers, tokenizer, run, options.state)
        save(network, tokenizer, options.model)
    return 0 if examine(*load(options.model), options.count, seed=0, thinks=options.thinking) else 1


if __name__ == "__main__":
    sys.exit(main())
