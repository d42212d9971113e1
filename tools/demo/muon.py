"""The optimizer of the matrices: Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Called by `train.py`. It needs about half the samples that AdamW needs here.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum with steps orthogonalized by a Newton-Schulz iteration; each thread processes all matrices of one shape at
    once."""

    def __init__(self, matrices: list[nn.Parameter], threads: ThreadPoolExecutor, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum, "decay": 0.01})
        self._threads = threads

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            list(self._threads.map(partial(self._step, group), by_shape.values()))

    @torch.no_grad()
    def _step(self, group: dict[str, Any], matrices: list[nn.Parameter]) -> None:
        updates = []
        for matrix in matrices:
            assert matrix.grad is not None
            velocity = self.state[matrix].setdefault("velocity", torch.zeros_like(matrix))
            velocity.lerp_(matrix.grad, 1 - group["momentum"])
            updates.append(torch.lerp(matrix.grad, velocity, group["momentum"]))
        num_rows, num_columns = matrices[0].shape
        scale = group["lr"] * max(1.0, num_rows / num_columns) ** 0.5
        for matrix, update in zip(matrices, _orthogonal(torch.stack(updates)), strict=True):
            matrix.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=scale)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices [n, rows, columns] with singular values of about 1, by five Newton-Schulz steps in
    bfloat16."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    work = matrices.mT if is_tall else matrices
    work = (work / (work.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = work @ work.mT
        work = 3.4445 * work + (-4.7750 * square + 2.0315 * square @ square) @ work
    result: Tensor = work.mT if is_tall else work
    return result.float()
