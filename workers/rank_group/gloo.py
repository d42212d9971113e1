"""Collectives of paddle.distributed over gloo, on tensors of the host: the baseline for benchmarks of the comm arena."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np


def gloo_calls(rank: int, num_ranks: int, port: int) -> dict[str, Callable[[np.ndarray], object]]:
    """Return all_gather and all_reduce of float32, summed in place. Ranks meet at `port` and the ports after it, which Paddle
    reads from the environment."""
    endpoints = [f"127.0.0.1:{port + 1 + other}" for other in range(num_ranks)]
    os.environ.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(num_ranks),
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_MASTER=f"127.0.0.1:{port}",
        PADDLE_DISTRI_BACKEND="gloo",
    )
    import paddle
    import paddle.distributed

    paddle.set_device("cpu")
    paddle.distributed.init_parallel_env()
    tensors: dict[int, Any] = {}

    def tensor_of(x: np.ndarray) -> Any:
        if len(x) not in tensors:
            tensors[len(x)] = paddle.to_tensor(x)
        return tensors[len(x)]

    return {
        "all_gather": lambda x: paddle.distributed.all_gather([], tensor_of(x)),
        "all_reduce": lambda x: paddle.distributed.all_reduce(tensor_of(x)),
    }
