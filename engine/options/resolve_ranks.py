"""Number of ranks and the share of each. Used by `resolve.py`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.model_config import ModelConfig
from engine.config import EplbConfig
from engine.errors import OptionError
from engine.options.table import MAX_RANKS, OPTIONS, OptionValues
from engine.parallel.placement import max_redundant_experts
from engine.process.nodes import seat_of
from shm.control_groups import ROOT, group_directories

_OF_SHARED_EXPERTS = ("ep_batched_token_timeout_ms", "ep_mixed_steps", "num_max_dispatch_tokens_per_rank")

_QUOTAS = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # files by version: microseconds per period
_NO_QUOTA = ("-1", "max")


def resolve_ranks(options: OptionValues, model: ModelConfig) -> int:
    """Return the number of ranks of all replicas. Raises OptionError if the model cannot be split that way."""
    values = options.values
    size: int = values["tensor_parallel_size"]
    heads = model.num_attention_heads
    of_layers = sorted({model.layer_shape(index).num_kv_heads for index in range(model.num_layers)})
    if values["pipeline_parallel_size"] > 1:
        raise OptionError(
            f"--pipeline-parallel-size {values['pipeline_parallel_size']}: pipeline parallelism is not supported, "
            "only 1; use --tensor-parallel-size"
        )
    has_attention = model.attention_layers is None or len(model.attention_layers) > 0
    if has_attention and heads % size:
        raise OptionError(
            f"--tensor-parallel-size {size} does not divide the {heads} attention heads of the model; use one of "
            f"{_divisors(heads)}"
        )
    for kv_heads in of_layers if has_attention else ():
        if kv_heads % size and size % kv_heads:
            fitting = [count for count in _divisors(heads) if all(not (each % count and count % each) for each in of_layers)]
            raise OptionError(
                f"--tensor-parallel-size {size} is neither a divisor nor a multiple of the {kv_heads} KV heads of the "
                f"model; use one of {fitting}"
            )
    value_heads = model.recurrence.num_value_heads if model.recurrence is not None else 0
    if value_heads % size:
        fitting = [count for count in _divisors(heads) if value_heads % count == 0]
        raise OptionError(
            f"--tensor-parallel-size {size} does not divide the {value_heads} heads of the model's recurrent layers; use one "
            f"of {fitting}"
        )
    num_ranks: int = size * values["data_parallel_size"]
    if values["enable_expert_parallel"]:
        _check_experts(model, num_ranks)
    if values["enable_eplb"]:
        _check_balancing(values["enable_expert_parallel"], values["eplb_config"], model, num_ranks)
    if num_ranks > MAX_RANKS:
        raise OptionError(
            f"--tensor-parallel-size {size} times --data-parallel-size {values['data_parallel_size']} is "
            f"{num_ranks} ranks, but the limit is {MAX_RANKS}; lower one of them"
        )
    return num_ranks


def _check_experts(model: ModelConfig, num_ranks: int) -> None:
    if model.experts is None:
        raise OptionError(f"--enable-expert-parallel: the model ({model.architecture}) has no experts; remove it")
    if num_ranks == 1:
        raise OptionError(
            "--enable-expert-parallel needs at least 2 ranks, but there is 1 rank; add --data-parallel-size or "
            "--tensor-parallel-size"
        )


def resolve_dispatch_rows(options: OptionValues) -> int:
    """Return the number of rows that a rank can send its peers through permanent memory: at least those of every decode
    step."""
    values = options.values
    for key in _OF_SHARED_EXPERTS:
        if key in options.given and not values["enable_expert_parallel"]:
            name = f"--{OPTIONS[key].name}" if values[key] is not False else f"--no-{OPTIONS[key].name}"
            raise OptionError(f"{name} needs expert parallelism; add --enable-expert-parallel, or remove it")
    max_drafts: int = values["speculative_config"].max_drafts
    most: int = values["max_num_seqs"] * (1 + max_drafts)
    num_rows: int = values["num_max_dispatch_tokens_per_rank"] or most
    ranks: int = values["tensor_parallel_size"]  # they split the rows of their replica
    needed = -(-most // ranks)
    if num_rows < needed:
        drafts = f" with {max_drafts} draft tokens each (--speculative-config)" if max_drafts else ""
        raise OptionError(
            f"--num-max-dispatch-tokens-per-rank {num_rows} is too small: a decode step has up to {most} rows "
            f"(--max-num-seqs{drafts}), {needed} for each of {ranks} ranks; raise it to at least {needed}, or "
            "lower --max-num-seqs"
        )
    return num_rows


def _check_balancing(shares_experts: bool, config: EplbConfig, model: ModelConfig, num_ranks: int) -> None:
    if not shares_experts or model.experts is None:
        raise OptionError("--enable-eplb needs expert parallelism; add --enable-expert-parallel")
    most = max_redundant_experts(model.experts.num_experts, num_ranks)
    if config.num_redundant_experts > most:
        raise OptionError(
            f"--eplb-config num_redundant_experts {config.num_redundant_experts} is too large: "
            f"{model.experts.num_experts} experts on {num_ranks} ranks have at most {most} redundant copies; "
            "lower it"
        )


def resolve_threads(options: OptionValues, num_ranks: int, nodes: Sequence[Sequence[int]]) -> int:
    """Return the threads of each rank: as given, else the cores divided among ranks, also per memory node if ranks are
    bound."""
    cores = available_cores()
    seats = [seat_of(rank, num_ranks, nodes) for rank in range(num_ranks)] if nodes else []
    most = min([cores // num_ranks, *(len(seat.cores) // seat.count for seat in seats)])
    threads: int = options.values["threads"] or max(1, most)
    if num_ranks > 1 and threads > most:
        options.notes.append(
            f"{num_ranks} ranks of {threads} threads share {cores} cores; fewer threads (--threads) or fewer "
            "ranks would be faster"
        )
    return threads


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, min(number, MAX_RANKS) + 1) if number % count == 0]


def available_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use, by affinity and by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    for version, group in group_directories("cpu", root):
        try:
            quota, period = " ".join((group / name).read_text() for name in _QUOTAS[version]).split()
        except (OSError, ValueError):
            continue
        if quota not in _NO_QUOTA:
            cores = max(1, min(cores, math.ceil(int(quota) / int(period))))
    return cores
