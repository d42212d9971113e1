"""The layouts that must not change a byte, and a comparison of any of them with one rank.

    python -m tests.e2e.layouts                       every layout of every model in every precision
    python -m tests.e2e.layouts qwen3_moe int4        those of this model, in this precision

The suite has each of them in some pair (`test_many_ranks.py`).
"""

from __future__ import annotations

import json
import sys

from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.precisions import PRECISIONS
from tests.e2e.workload import answers, answers_together, mixed_bodies

MODELS = ("qwen3_moe", "ernie4_5_moe", "deepseek_v3")
OPTIONS = ("--max-model-len", "400", "--restart-limit", "100")
ALWAYS_MOVING = json.dumps(
    {"num_redundant_experts": 3, "window_size": 60, "step_interval": 5, "check_interval_s": 0.02, "min_gain": 0}
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp2": ("-tp", "2"),
    "dp2": ("-dp", "2"),
    "tp2-dp2": ("-tp", "2", "-dp", "2"),
    "tp2-ep": ("-tp", "2", "--enable-expert-parallel"),
    "dp2-ep": ("-dp", "2", "--enable-expert-parallel"),
    "tp2-dp2-ep": ("-tp", "2", "-dp", "2", "--enable-expert-parallel"),
    "dp2-ep-apart": ("-dp", "2", "--enable-expert-parallel", "--no-ep-mixed-steps", "--ep-batched-token-timeout-ms", "0"),
    "dp2-ep-eplb": ("-dp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config", ALWAYS_MOVING),
    "tp2-ep-eplb": ("-tp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config", ALWAYS_MOVING),
}
CHUNKED = ("--max-num-batched-tokens", "32", "--max-num-seqs", "16")
BODIES = mixed_bodies(16, seed=20)


def check(model: str, precision: str, layouts: tuple[str, ...]) -> None:
    """Alone and in whole chunks on one rank; together in small chunks, then with a warm prefix cache, on several."""
    options = (*OPTIONS, *PRECISIONS[precision])
    with EngineProcess(GOLDEN / model, *options, "--no-enable-prefix-caching") as one:
        expected = answers(one, BODIES, concurrency=1)
    for layout in layouts:
        with EngineProcess(GOLDEN / model, *options, *CHUNKED, "--threads", "1", *LAYOUTS[layout]) as several:
            assert answers_together(several, BODIES) == expected, layout
            assert answers(several, BODIES[::-1], concurrency=7)[::-1] == expected, layout


def main(arguments: list[str]) -> None:
    models = [name for name in arguments if name in MODELS] or MODELS
    precisions = [name for name in arguments if name in PRECISIONS] or PRECISIONS
    for model in models:
        for precision in precisions:
            for layout in LAYOUTS:
                check(model, precision, (layout,))
                print(f"{model} {precision} {layout}: the same bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
