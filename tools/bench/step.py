"""`tokamak bench step`: time of a step, op by op, compared with the limits of this machine.

Runs a worker's runner in this process, without any actor; `main` is called by tools/cli.py. Accepts the options of `tokamak
serve` besides its own. Reading order: replays.py (what is run), roofline.py (limits), kernels.py (chosen kernels), then this
file (results).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from rich import box
from rich.console import Console, Group
from rich.table import Table

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig, SpeculativeConfig
from engine.errors import OptionError
from engine.messages import SamplingParams
from engine.options.argument_parser import ArgumentParser
from engine.options.read import read_options
from engine.options.resolve import resolve
from ops import _cpu
from ops.cpu.work import Work
from tools.bench.drafts import ACCEPTANCES, drafts_document, render_drafts
from tools.bench.kernels import KernelRates
from tools.bench.pictures import image_size
from tools.bench.replays import Case, Replays, Timed, TimedOp
from tools.bench.roofline import Roofline, measure
from tools.bench.shares import on_paper, render_shares, shares_document
from tools.demo import MODELS
from tools.exits import exit_code
from tools.units import seconds, share

PHASES = ("decode", "prefill", "encode")
SETTINGS = ("model", "dtype", "quantization", "kv_cache_dtype", "threads", "block_size")
MAX_DRAFTS = 16
TABLE_WIDTH = 112
LATENCY_SHARE = 0.2  # an op that takes five times its minimum by memory and arithmetic is limited by something else


@dataclass(frozen=True, slots=True)
class Row:
    """All ops of one kind and name. Bound: "memory", "compute", or "latency" if neither is close."""

    op: str
    num_calls: int
    seconds: float
    work: Work
    bounds_s: dict[str, float]

    @property
    def bound(self) -> str:
        return max(self.bounds_s, key=lambda name: self.bounds_s[name]) if self.roofline_share >= LATENCY_SHARE else "latency"

    @property
    def roofline_share(self) -> float:
        """Return the time by the roofline as a share of the measured time."""
        return max(self.bounds_s.values()) / self.seconds if self.seconds else 0.0


def rows(ops: Iterable[TimedOp], roofline: Roofline) -> list[Row]:
    """Return the ops of a replay by kind and name, the slowest first."""
    found: dict[str, list[TimedOp]] = {}
    for op in ops:
        found.setdefault(op.profile.title, []).append(op)
    made = [_row(name, same, roofline) for name, same in found.items()]
    return sorted(made, key=lambda row: -row.seconds)


def _row(name: str, ops: list[TimedOp], roofline: Roofline) -> Row:
    works = [op.profile.work for op in ops]
    work = Work(sum(work.num_bytes for work in works), sum(work.num_operations for work in works), works[0].format)
    return Row(name, len(ops), sum(op.seconds for op in ops), work, roofline.bounds_s(work))


# ------------------------------------------------------------------------------------------------------------ output


def document(config: EngineConfig, roofline: Roofline, kernels: KernelRates, timed: Sequence[Timed]) -> dict[str, Any]:
    """Return the JSON document, in seconds, bytes and operations."""
    return {
        "settings": {name: value for name, value in msgspec.structs.asdict(config).items() if name in SETTINGS},
        "variant": _cpu.variant(),
        "kernels": kernels.document(),
        "roofline": {
            "bytes_per_s": roofline.bytes_per_s,
            "operations_per_s": {kind: peak.operations_per_s for kind, peak in roofline.peaks.items()},
            "units": {kind: [peak.unit, peak.variant] for kind, peak in roofline.peaks.items()},
        },
        "cases": [_case_document(one, rows(one.ops, roofline)) for one in timed],
    }


def _case_document(timed: Timed, found: list[Row]) -> dict[str, Any]:
    case = timed.case
    return {
        "phase": case.phase,
        "batch": case.batch,
        "num_tokens": case.num_tokens,
        "num_drafts": case.num_drafts,
        "context": case.context,
        f"{case.unit}_per_s": case.batch * case.num_tokens / timed.step_s,
        "step_s": timed.step_s,
        "replay_s": timed.replay_s,
        "sample_s": timed.sample_s,
        "rest_s": timed.rest_s,
        "ops": [
            {
                "op": row.op,
                "calls": row.num_calls,
                "seconds": row.seconds,
                "bytes": row.work.num_bytes,
                "operations": row.work.num_operations,
                "bound": row.bound,
                "roofline_share": row.roofline_share,
            }
            for row in found
        ],
    }


def render(timed: Timed, roofline: Roofline) -> Group:
    """Return a table of the ops, and the times around them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=timed.case.title, title_justify="left", title_style="bold")
    table.add_column("op", no_wrap=True)
    for column in ("calls", "time", "share", "MB", "GFLOP", "GB/s", "GFLOP/s", "bound", "of it"):
        table.add_column(column, justify="right", no_wrap=True)
    found = rows(timed.ops, roofline)
    total_s = sum(row.seconds for row in found)
    for row in found:
        table.add_row(*_cells(row, row.seconds / total_s if total_s else 0.0))
    table.add_section()
    whole = Work(sum(row.work.num_bytes for row in found), sum(row.work.num_operations for row in found))
    bound_s = sum(max(row.bounds_s.values()) for row in found)
    everything = Row("replay", sum(row.num_calls for row in found), total_s, whole, {"roofline": bound_s})
    table.add_row(*_cells(everything, 1.0))
    case = timed.case
    sampling = "" if case.phase == "encode" else f", sampling {seconds(timed.sample_s)}"
    return Group(
        table,
        f"step {seconds(timed.step_s)}: replay {seconds(timed.replay_s)}{sampling}, "
        f"Python {seconds(timed.rest_s)}; {case.batch * case.num_tokens / timed.step_s:,.0f} {case.unit}/s",
        "",
    )


def _cells(row: Row, part: float) -> list[str]:
    giga_operations = row.work.num_operations / 1e9
    return [
        row.op,
        str(row.num_calls),
        seconds(row.seconds),
        f"{100 * part:.1f}%",
        f"{row.work.num_bytes / 1e6:.2f}",
        f"{giga_operations:.3f}" if giga_operations else "",
        f"{row.work.num_bytes / 1e9 / row.seconds:.1f}" if row.seconds else "",
        f"{giga_operations / row.seconds:.0f}" if giga_operations and row.seconds else "",
        row.bound,
        share(row.roofline_share),
    ]


def _heading(config: EngineConfig, roofline: Roofline) -> str:
    best = {peak.unit: peak for peak in roofline.peaks.values()}
    peaks = ", ".join(f"{unit} {peak.operations_per_s / 1e9:.0f} GFLOP/s" for unit, peak in best.items())
    return (
        f"{config.model}: {config.threads} threads, {config.kernels_text}\n"
        f"this machine: {roofline.bytes_per_s / 1e9:.1f} GB/s from memory, {peaks}\n"
    )


# ----------------------------------------------------------------------------------------------------------- options


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1 separated by commas, got {text}")
    return numbers


def _drafts(text: str) -> list[int]:
    """Parse numbers of drafts, with 0 first, to which the others are compared."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 0 or max(numbers) > MAX_DRAFTS:
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to {MAX_DRAFTS} separated by commas, got {text}")
    return [0, *(number for number in numbers if number)]


def _shares(text: str) -> list[float]:
    numbers = [float(part) for part in text.split(",")]
    if not all(0 <= number <= 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 1 separated by commas, got {text}")
    return numbers


def _count(text: str) -> int:
    (number,) = _numbers(text)
    return number


def _sizes(text: str) -> list[tuple[int, int]]:
    return [image_size(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="tokamak bench step",
        description=(
            "Measure where the time of a step goes, op by op. Also takes the options of `tokamak serve`, such as "
            "--model, --dtype, --quantization and --threads."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--phase", choices=PHASES, action="append", help="default: all phases that the model has")
    parser.add_argument(
        "--batch", type=_numbers, default=[1, 16], metavar="N,...", help="sequences of a decode step; default: 1,16"
    )
    parser.add_argument(
        "--context", type=_numbers, default=[128], metavar="N,...", help="context of each sequence; default: 128"
    )
    parser.add_argument(
        "--drafts",
        type=_drafts,
        default=[0],
        metavar="N,...",
        help="draft tokens per sequence to verify, besides 0; default: 0",
    )
    parser.add_argument(
        "--acceptance",
        type=_shares,
        default=list(ACCEPTANCES),
        metavar="A,...",
        help="acceptance rates for the estimated gain of draft tokens; default: " + ",".join(map(str, ACCEPTANCES)),
    )
    parser.add_argument(
        "--tokens", type=_numbers, default=[512], metavar="N,...", help="tokens of a prefill step; default: 512"
    )
    parser.add_argument(
        "--image-size",
        type=_sizes,
        default=[(448, 448)],
        metavar="WxH,...",
        help="size of the encoded image in pixels; default: 448x448",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)g")
    parser.add_argument(
        "--repeat", type=_count, default=20, metavar="N", help="number of steps; the median is reported; default: 20"
    )
    parser.add_argument(
        "--on-paper",
        type=_numbers,
        default=[],
        metavar="N,...",
        help="also estimate how N threads would divide the ops (shares.py)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases of text."""
    found = []
    for phase in options.phase or PHASES:
        if phase == "decode":
            found += [
                Case(phase, batch, 1 + drafts, context + drafts, num_drafts=drafts)
                for context in options.context
                for batch in options.batch
                for drafts in options.drafts
            ]
        elif phase == "prefill":
            found += [Case(phase, 1, tokens, tokens) for tokens in options.tokens]
    return found


def pictures(options: argparse.Namespace, config: EngineConfig, model: ModelConfig) -> list[Case]:
    if "encode" not in (options.phase or PHASES):
        return []
    if not config.encoder_cache_size or model.vision is None:
        if options.phase:
            raise OptionError(
                f"--phase encode needs a vision encoder: {config.model} has none, or is served without it; choose another phase"
            )
        return []
    found = [Case.of_picture(size, model.vision) for size in options.image_size]
    for case in found:
        if (num_tokens := model.vision.num_tokens_of(*case.grid)) > config.encoder_cache_size:
            raise OptionError(
                f"an image of {num_tokens} tokens exceeds --encoder-cache-size {config.encoder_cache_size}; raise it, "
                "or use a smaller image"
            )
    return found


def _config(given: Sequence[str], wanted: Sequence[Case], kernels: KernelRates) -> tuple[EngineConfig, ModelConfig]:
    """Return the configuration of an engine with room for every text case, unless options say otherwise."""
    options = read_options(given, os.environ, MODELS)
    if unknown := {"ops", "plan"} & options.given:
        raise OptionError(f"--{unknown.pop()} does not apply: only tapes of native ops can be profiled; remove it")
    longest = max((case.context + 1 for case in wanted), default=2)
    needed = {
        "max_num_seqs": max((case.batch for case in wanted), default=1),
        "max_num_batched_tokens": max((case.batch * case.num_tokens for case in wanted), default=1),
        "num_kv_blocks": max([2, *(case.num_blocks(options.values["block_size"]) for case in wanted)]),
    }
    for name, value in needed.items():
        options.values[name] = max(value, options.values[name] or 0) if name != "num_kv_blocks" else value
    if num_drafts := max((case.num_drafts for case in wanted), default=0):  # all of them, without an adaptive policy
        speculative = options.values["speculative_config"]
        if num_drafts > speculative.max_drafts:
            speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts)
        options.values["speculative_config"] = msgspec.structs.replace(speculative, adaptive=False)
    options.given.add("speculative_config")  # none by default
    config, model = resolve(options, choose_kernels=kernels.choose)
    limit = model.config.max_position_embeddings
    if longest > limit:
        raise OptionError(
            f"a context of {longest - 1} tokens plus one new token exceeds the limit of the model, {limit} "
            "positions; use a shorter context"
        )
    return msgspec.structs.replace(config, max_model_len=longest), model.config


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0: measured; or as `tools/exits.py` says."""
    options, rest = _parser().parse_known_args(argv)
    wanted = cases(options)

    def measured() -> int:
        kernels = KernelRates()
        config, model = _config(rest, wanted, kernels)
        return _run(options, config, [*wanted, *pictures(options, config, model)], kernels)

    return exit_code("tokamak bench step", measured)


def _run(options: argparse.Namespace, config: EngineConfig, wanted: Sequence[Case], kernels: KernelRates) -> int:
    kernels.measure_peaks()
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, TABLE_WIDTH))
    with contextlib.closing(Replays(config)) as replays:
        roofline = measure()
        sampling = SamplingParams(temperature=options.temperature)
        timed, papers = [], []
        if not options.json:
            console.print(_heading(config, roofline))
            console.print(kernels.table(replays.kinds(), config.kv_cache_dtype))
        for case in wanted:
            timed.append(replays.time(case, options.repeat, sampling))
            papers.append(on_paper(replays, case, options.repeat, options.on_paper))
            if not options.json:
                console.print(render(timed[-1], roofline))
                if options.on_paper:
                    console.print(render_shares(case, papers[-1]))
    if any(options.drafts) and not options.json:
        console.print(render_drafts(timed, options.acceptance))
    if options.json:
        found = document(config, roofline, kernels, timed)
        for case, paper in zip(found["cases"], papers, strict=True):
            case["on_paper"] = shares_document(paper)
        found["drafts"] = drafts_document(timed, options.acceptance) if any(options.drafts) else []
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    return 0
