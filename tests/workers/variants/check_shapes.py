"""Serves the checkpoints that random_shapes.py made, in chunks and whole, and compares the answers with those of transformers:

python -m tests.workers.variants.check_shapes OUT [--ops reference]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.errors import TokamakError
from engine.messages import SamplingParams
from tests.workers.seeing import cut_at_units, encode_units, make_seeing_runner
from tests.workers.serving import ServedSequence, Serving, make_runner

TOLERANCE = 1e-3


def differences(place: Path, ops: str) -> str:
    """Return what differs between the answers of a checkpoint and those of transformers, or nothing."""
    expected = json.loads((place / "expected.json").read_text())
    config = ModelConfig.read(place)
    if config.unknown_options:
        return f"options that are not read: {config.unknown_options}"
    options: dict[str, Any] = {"ops": "reference", "plan": "eager"} if ops == "reference" else {"ops": ops}
    vision, options = config.vision, options | {"max_model_len": 512, "num_kv_blocks": 80}
    runner = make_runner(place, **options) if vision is None else make_seeing_runner(place, **options)[0]
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    num_outputs = len(expected["greedy_token_ids"])
    whole, chunked = (ServedSequence(expected["prompt_token_ids"], sampling, num_outputs) for _ in range(2))
    units, rows, hashes = encode_units(runner, vision, expected["units"]) if vision is not None else ((), [], ())
    for sequence, chunk in ((whole, 512), (chunked, 16)):
        sequence.units, sequence.unit_rows, sequence.unit_hashes = units, list(rows), hashes
        serving = Serving(runner, chunk=chunk)
        serving.place(sequence, 1)
        if vision is not None and vision.sees_whole_units and chunk < 512:
            cut_at_units(serving, sequence)
        serving.run([sequence])
    if chunked.answer() != whole.answer():
        return "chunks change the answer"
    if whole.outputs != expected["greedy_token_ids"]:
        at = next(
            i for i, pair in enumerate(zip(whole.outputs, expected["greedy_token_ids"], strict=True)) if pair[0] != pair[1]
        )
        return f"token {at}: {whole.tops[at]}, expected {expected['top_logprobs'][at]}"
    given = np.array([found for _, found in whole.tops])
    wanted = np.array([[value for _, value in tops] for tops in expected["top_logprobs"]])
    largest = float(np.abs(given - wanted).max())
    return f"log-probabilities differ by {largest:.2g}" if largest > TOLERANCE else ""


def checkpoints(out: Path, families: Sequence[str] = (), count: int = 1000) -> list[Path]:
    """Return the directories in `out`, the first `count` of each family; the first of all families, then the second."""
    places = sorted((path.name.rpartition("-")[0], int(path.name.rpartition("-")[2]), path) for path in out.iterdir())
    chosen = [group for group in places if not families or group[0] in families]
    grouped = itertools.groupby(chosen, key=lambda group: group[0])
    ranked = [(rank, *group) for _, group in grouped for rank, group in enumerate(itertools.islice(group, count))]
    return [path for *_, path in sorted(ranked)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ops", default="native")
    parser.add_argument("--family", nargs="+", default=[])
    options = parser.parse_args()
    num_failed, places = 0, checkpoints(options.out, options.family)
    for place in places:
        try:
            problem = differences(place, options.ops)
        except TokamakError as error:
            problem = f"refused: {error}"
        except Exception:
            problem = traceback.format_exc(limit=-1).replace("\n", " ")
        num_failed += bool(problem)
        if problem:
            print(f"{place.name}: {problem}", flush=True)
    print(f"{len(places)} checkpoints, {num_failed} differ")
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
