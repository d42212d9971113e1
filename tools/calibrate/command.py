"""`tokamak calibrate`: run a text through a model and write the mean square of each input of its linears, by which
--quantization-calibration rounds weights.

Called by tools/cli.py, in its own process. Exit codes: 0 written, 1 not written, 2 bad arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from engine.checkpoint.files import read_file
from engine.checkpoint.record import ModelRecord
from engine.config import EngineConfig
from engine.errors import OptionError, TokamakError
from engine.installation import command
from engine.options.argument_parser import ArgumentParser
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.tokenizer.vocabulary import Vocabulary
from tools.calibrate.reading import Reading
from tools.demo import MODELS
from tools.exits import exit_code
from workers.weights.calibration import write_calibration

_LEAST_TOKENS = 32  # of a text, and of its last piece
_REFUSED = ("ops", "device", "plan", "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "enable_lora")


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = _parser().parse_known_args(argv)
    return exit_code("tokamak calibrate", lambda: _calibrate(options, rest))


def _calibrate(options: argparse.Namespace, rest: Sequence[str]) -> int:
    config, record = _config(options, rest)
    pieces = pieces_of(_text(options.text), Vocabulary.of(record), config.max_model_len, options.max_tokens)
    squares = _squares(config, record, pieces)
    metadata = {"model": config.model, "text": str(options.text), "num_tokens": str(sum(map(len, pieces)))}
    _write(options.output, squares, metadata)
    print(options.output)
    print(
        f"use it with: {command('serve')} --model {options.model} --quantization wint4 --quantization-calibration "
        f"{options.output}",
        file=sys.stderr,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="tokamak calibrate",
        description="Run a text through a model and write statistics for --quantization-calibration.",
        epilog="Other options are those of `tokamak serve`, such as --dtype, --quantization and --threads.",
    )
    parser.add_argument("model", help="as for --model of `tokamak serve`")
    parser.add_argument("text", type=Path, help="file of UTF-8 text, similar to what the model will read and write")
    parser.add_argument("output", type=Path, help="file to write, NAME.safetensors")
    parser.add_argument("--max-tokens", type=_count, default=16384, metavar="N", help="tokens to read; default: %(default)s")
    parser.add_argument(
        "--piece-tokens",
        type=_count,
        default=512,
        metavar="N",
        help="tokens of each prompt made of them, at most the limit of the model; default: %(default)s",
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < _LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"{value} is too few; the minimum is {_LEAST_TOKENS}")
    return value


def _config(options: argparse.Namespace, rest: Sequence[str]) -> tuple[EngineConfig, ModelRecord]:
    """Return the configuration of an engine that has one sequence of a piece at a time."""
    if not options.output.parent.is_dir():
        raise OptionError(f"{options.output} cannot be written: {options.output.parent} is not a directory")
    given = read_options(["--model", options.model, *rest], os.environ, MODELS)
    for name in _REFUSED:
        if name in given.given:
            raise OptionError(
                f"--{name.replace('_', '-')} does not apply: the text goes through one rank with native ops; remove it"
            )
    size = given.values["block_size"]
    given.values |= {
        "max_num_seqs": 1,
        "max_num_batched_tokens": max(options.piece_tokens, size),
        "num_kv_blocks": -(-options.piece_tokens // size) + 1,
        "language_model_only": True,
    }
    config, record = resolve(given)
    if config.ops != "native":
        raise OptionError(f"{options.model} cannot be calibrated: it needs native ops, but would use {config.ops} ops")
    return msgspec.structs.replace(
        config, plan="eager", max_model_len=min(options.piece_tokens, record.config.max_position_embeddings)
    ), record


def _text(path: Path) -> str:
    try:
        return read_file(path).decode()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def pieces_of(text: str, vocabulary: Vocabulary, size: int, most: int) -> list[list[int]]:
    """Return pieces of the text, of at most `size` tokens each and `most` in all, with the model's first token. Raises
    OptionError if the text is too short."""
    first = vocabulary.encode("", True)[:1]
    token_ids = vocabulary.encode(text[: most * vocabulary.longest_token_bytes], False)
    step = size - len(first)
    pieces: list[list[int]] = []
    for begin in range(0, min(len(token_ids), most), step):
        own = token_ids[begin : min(begin + step, most)]
        if len(own) >= _LEAST_TOKENS or not pieces:
            pieces.append([*first, *own])
    if len(token_ids) < _LEAST_TOKENS:
        raise OptionError(f"the text has {len(token_ids)} tokens, the minimum is {_LEAST_TOKENS}; use a longer text")
    return pieces


def _squares(config: EngineConfig, record: ModelRecord, pieces: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    reading = Reading(config, record.config, _say_loading)
    begin_s = time.monotonic()
    for number, piece in enumerate(pieces, 1):
        reading.read(piece)
        _say(f"piece {number} of {len(pieces)}, {time.monotonic() - begin_s:.0f} s")
    _say("")
    return reading.collector.mean_squares()


def _say_loading(num_done: int, num_bytes: int) -> None:
    _say(f"loading weights, {100 * num_done // max(num_bytes, 1)} %")


def _say(text: str) -> None:
    """Replace the line of progress, in a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _write(path: Path, squares: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    try:
        write_calibration(path, squares, metadata)
    except OSError as error:
        raise TokamakError(f"{path} cannot be written: {error.strerror or error}") from error
