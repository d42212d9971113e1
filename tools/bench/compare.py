"""`tokamak bench compare`: compares several servers in interleaved rounds and prints a table of medians and ratios.

    tokamak bench compare 'ours=tokamak serve --model M --port {port}' 'other=llama-server -m M.gguf --port {port}'

One server runs at a time, and each round begins with another one, since machines drift. Each figure has the share of the CPUs
that other processes used: `--most-foreign 0.05` repeats measurements above that share. The load is that of `tokamak bench
serve`, which runs as a separate process. peers.md describes how to install the peers, and has results.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from engine.errors import OptionError, TokamakError
from engine.options.argument_parser import ArgumentParser
from tokamak.launched import COMMAND
from tools.bench.processes import Others, ServerProcess

KINDS = ("decode", "prefill", "load", "prefix", "picture", "pictures")
READY, PEAK = "ready s", "peak PSS MiB"


@dataclass(frozen=True, slots=True)
class Workload:
    """One figure of the table. decode: tokens/s while all streams decode; prefill: prompt tokens/s of one stream until its
    first token; load, prefix: output tokens/s in total, for prompts without and with a shared prefix; picture, pictures:
    seconds until the first token, and pictures/s, of chats with a new picture of `input_len` x `input_len` pixels each."""

    kind: str
    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int

    @property
    def title(self) -> str:
        if self.kind == "decode":
            return f"decode c={self.concurrency} tok/s"
        if self.kind == "prefill":
            return f"prefill {self.input_len} tok/s"
        if self.kind in ("picture", "pictures"):
            figure = "TTFT s" if self.kind == "picture" else "pictures/s"
            return f"{self.input_len}x{self.input_len} c={self.concurrency} {figure}"
        return f"{self.kind} {self.input_len}+{self.output_len} c={self.concurrency} out tok/s"

    @property
    def shared_prefix_len(self) -> int:
        return self.input_len * 8 // 9 if self.kind == "prefix" else 0

    @property
    def prompt(self) -> list[str]:
        """Options of `tokamak bench serve`."""
        if self.kind not in ("picture", "pictures"):
            shared = ["--shared-prefix-len", str(self.shared_prefix_len)]
            return ["--prompts", "text", "--input-len", str(self.input_len), *shared]
        size = f"{self.input_len}x{self.input_len}"
        return ["--endpoint", "chat", "--input-len", str(_QUESTION_LEN), "--images-per-request", "1", "--image-size", size]

    def figure(self, result: dict[str, Any]) -> float:
        """Return the figure of a `tokamak bench serve` result. TokamakError if it measured nothing."""
        if result["num_failed"] or not result["num_succeeded"]:
            first = "".join(f": {error['kind']}: {error['first']}" for error in result["errors"][:1])
            raise TokamakError(f"{result['num_failed']} of {result['num_requests']} requests failed{first}")
        if self.kind == "decode":
            if result["decode_tokens_per_s"] is None:
                raise TokamakError("the first stream ended before the last one started; ask for more output tokens")
            return float(result["decode_tokens_per_s"])
        if self.kind == "prefill":
            return 1000 * self.input_len / float(result["ttft_ms"]["p50"])
        if self.kind == "picture":
            return float(result["ttft_ms"]["p50"]) / 1000
        if self.kind == "pictures":
            return float(result["num_succeeded"]) / float(result["wall_s"])
        return float(result["output_tokens_per_s"])

    @staticmethod
    def parse(text: str) -> Workload:
        kind, *numbers = text.split(":")
        try:
            workload = Workload(kind, *(int(number) for number in numbers))
        except (TypeError, ValueError):
            workload = None
        if workload is None or kind not in KINDS or min(int(number) for number in numbers) < 1:
            raise argparse.ArgumentTypeError(
                f"expected KIND:INPUT:OUTPUT:CONCURRENCY:REQUESTS with KIND one of {KINDS}, got {text}"
            )
        return workload


SETS = {
    "decode": tuple(Workload("decode", 128, 128, count, count) for count in (1, 4, 16)),
    "prefill": (Workload("prefill", 512, 1, 1, 3), Workload("prefill", 2048, 1, 1, 2)),
    "load": tuple(Workload("load", 256, 64, count, max(count, 3)) for count in (1, 4, 16, 32)),
    "prefix": (Workload("prefix", 1152, 32, 4, 16),),
    "pictures": tuple(
        Workload(*shape) for side in (448, 672) for shape in (("picture", side, 1, 1, 3), ("pictures", side, 1, 8, 8))
    ),
}
_WARM_UP = Workload("load", 128, 16, 4, 4)
_QUESTION_LEN = 32  # tokens of text with a picture


def _measure(server: ServerProcess, workload: Workload, model: str) -> tuple[dict[str, Any], float]:
    """Return the result, and the share of the CPUs used by other processes meanwhile."""
    command = [*COMMAND, "bench", "serve", "--url", server.url, "--output", "-", "--warmup", "0"]
    command += [*workload.prompt, "--output-len", str(workload.output_len), "--ignore-eos"]
    command += ["--concurrency", str(workload.concurrency), "--num-prompts", str(workload.num_prompts)]
    command += ["--model", model] if model else []
    others = Others()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    share = others.share()
    try:
        result: dict[str, Any] = orjson.loads(done.stdout)["result"]
    except (orjson.JSONDecodeError, KeyError):
        raise TokamakError(f"{server.name}: {workload.title}: {done.stderr.strip()[-300:]}") from None
    return result, share


def _undisturbed(server: ServerProcess, workload: Workload, options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Return the try with the least disturbance by other processes, and this share. The first one within the limit ends the
    tries. Tries too short to measure it are the last choice."""
    found: list[tuple[bool, float, dict[str, Any]]] = []
    while len(found) < options.tries and (not found or found[-1][:2] > (False, options.most_foreign)):
        result, share = _measure(server, workload, options.model)
        found.append((workload.kind == "decode" and result["decode_tokens_per_s"] is None, share, result))
    _, share, result = min(found, key=lambda one: one[:2])
    return result, share


def _figures(options: argparse.Namespace, name: str, command: str, console: Console) -> Iterator[tuple[str, float | None]]:
    """Start a server, run every workload on it, and stop it. None: could not be measured."""
    server = ServerProcess(name, command, Path(options.logs) / f"{name}.log", options.start_timeout)
    try:
        yield READY, server.ready_s
        _measure(server, _WARM_UP, options.model)
        for workload in options.workloads:
            result, share = _undisturbed(server, workload, options)
            figure: float | None = None
            try:
                figure = workload.figure(result)
                console.print(f"{name}: {workload.title}: {figure:.4g} (other processes used {share:.0%} of the CPUs)")
            except TokamakError as error:
                console.print(f"{name}: {workload.title}: {error}", style="red", markup=False)
            yield workload.title, figure
        server.measure_memory()
        yield PEAK, server.peak_bytes / (1 << 20)
    finally:
        server.stop()


def table(figures: dict[tuple[str, str], list[float]], names: Sequence[str]) -> str:
    """Return the medians in Markdown. The last column is the ratio of the first server to the best other: above 1 it is
    better."""
    lines = [f"| median of rounds | {' | '.join(names)} | {names[0]} / best other |", "|---" * (len(names) + 2) + "|"]
    for title in dict.fromkeys(title for title, _ in figures):
        medians = {name: statistics.median(figures[title, name]) for name in names if (title, name) in figures}
        is_less_better = title in (READY, PEAK) or title.endswith("TTFT s")
        others = [value for name, value in medians.items() if name != names[0]]
        ratio = ""
        if names[0] in medians and others:
            ours, best = medians[names[0]], min(others) if is_less_better else max(others)
            ratio = f"{best / ours if is_less_better else ours / best:.2f}"
        cells = (f"{medians[name]:.4g}" if name in medians else "-" for name in names)
        lines.append(f"| {title} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def server_argument(text: str) -> tuple[str, str]:
    name, _, command = text.partition("=")
    if not name or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"expected NAME=COMMAND with {{port}} in the command, got {text}")
    return name, command


def _set(text: str) -> list[Workload]:
    unknown = [name for name in text.split(",") if name not in SETS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown sets {', '.join(unknown)}; available: {', '.join(SETS)}")
    return [workload for name in text.split(",") for workload in SETS[name]]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="tokamak bench compare", description="Compare servers in interleaved rounds.")
    parser.add_argument(
        "servers",
        nargs="+",
        type=server_argument,
        metavar="NAME=COMMAND",
        help="server to compare; {port} in the command is replaced, and the first server is ours",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--set", type=_set, dest="workloads", default=_set("decode,prefill,load"), metavar="NAMES", help=", ".join(SETS)
    )
    chosen.add_argument("--workload", type=Workload.parse, action="append", metavar="KIND:INPUT:OUTPUT:CONCURRENCY:REQUESTS")
    parser.add_argument(
        "--most-foreign",
        type=float,
        default=1.0,
        metavar="SHARE",
        help=(
            "maximum share of the CPUs that other processes may use, 0 to 1; measurements above it are repeated; default: any"
        ),
    )
    parser.add_argument(
        "--tries", type=int, default=3, metavar="N", help="maximum number of measurements per figure; default: %(default)s"
    )
    parser.add_argument("--model", default="", help="model name for the requests; default: the first model in /v1/models")
    parser.add_argument(
        "--logs", default=".", metavar="DIRECTORY", help="directory for the logs of the servers; default: the current one"
    )
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="default: %(default)g")
    options = parser.parse_args(argv)
    options.workloads = options.workload or options.workloads
    if len({name for name, _ in options.servers}) < len(options.servers):
        raise OptionError("two servers have the same name; names must be unique")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0: everything was measured; 1: a server or a request failed; 2: bad options."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        options = _parse(argv)
    except OptionError as error:
        console.print(f"tokamak bench compare: {error}", style="red", markup=False)
        return 2
    figures: dict[tuple[str, str], list[float]] = {}
    code = 0
    for number in range(options.rounds):
        first = number % len(options.servers)
        for name, command in (*options.servers[first:], *options.servers[:first]):
            try:
                for title, figure in _figures(options, name, command, console):
                    if figure is None:
                        code = 1
                    else:
                        figures.setdefault((title, name), []).append(figure)
            except (TokamakError, OSError) as error:
                console.print(f"tokamak bench compare: {error}", style="red", markup=False)
                code = 1
    if figures:
        print(table(figures, [name for name, _ in options.servers]))
    return code
