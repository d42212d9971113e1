"""Paddle's fused ops as replacements for reference ops: candidates for each op of the table, the best first.

None is trusted. `choice.py` tries each candidate on its device with the model's shapes. A candidate with wrong results, or with
bits that depend on other rows, is skipped for the next one; the last one is the reference op.

A linear runs in tiles of 128 rows, padded with zeros: one shape, so one algorithm, for any batch; in tiles of 512 if a row has
the same bits there. All other ops work on each row separately.

Not used, and why:

- `block_multihead_attention_xpu`: only float16, no grouped queries in decode, prompts only from position 0, one token per row,
  and lengths copied to the host in each call: no chunks, prefix hits, drafts or graphs.
- `block_multihead_attention`: rows of a prompt see only keys of this step, so no chunks or prefix hits.
- `flash_attn_unpadded` on XPU copies the offsets to the host in each call. Attention is that of the reference.
- `moe_gate_dispatch` with `moe_combine`: without padding, the host must read the number of rows of each expert, as the
  reference does in large steps; with padding to the maximum, every expert multiplies as many rows as the step has. Paddle has
  no `fused_moe`.
- `weight_only_linear`, `fp8_gemm_blockwise`: activations become 16 or 8 bits, but this table is float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle
from msgspec.structs import replace
from paddle.incubate.nn import functional as fused
from paddle.nn.functional import swiglu

from ops.modules import GateClamp, Linear, Module, Norm, Rotary
from ops.paddle import reference
from ops.table import Inputs, OpTable
from ops.weight_format import Source, Store, float32

TILE = 128  # rows of a linear
Pack = Callable[[Module, Mapping[str, Source], Store], None]


class Candidate(NamedTuple):
    """`change`: returns the table with this candidate in place of its own op."""

    name: str
    change: Callable[[OpTable], OpTable]


def tiled_linear(*tiles: int) -> Callable[[OpTable], OpTable]:
    """Return a candidate that computes a linear in the largest full tiles, and in tiles of TILE rows for the rest."""

    def linear(x: paddle.Tensor, module: Linear) -> paddle.Tensor | reference.Cut:
        rows = x.shape[0]
        padded = -(-rows // TILE) * TILE
        if padded > rows:
            x = paddle.concat([x, paddle.zeros([padded - rows, x.shape[1]])])
        parts, begin = [], 0
        while begin < padded:
            end = begin + next((tile for tile in tiles if begin + tile <= padded), TILE)
            parts.append(paddle.matmul(x[begin:end], module.weight))
            begin = end
        y = (parts[0] if len(parts) == 1 else paddle.concat(parts))[:rows]
        y = y if module.bias is None else y + module.bias
        return reference.Cut(y, module.columns[0][0], module.width) if module.columns else y

    return lambda table: replace(table, linear=linear, pack=_packing(table, Linear, _pack_linear))


def _pack_linear(module: Linear, sources: Mapping[str, Source], store: Store) -> None:
    """Pack as [in, out], with this rank's outputs."""
    own = module.columns or ((0, module.width),)
    for name, source in sources.items():
        values = float32(source())
        part = np.concatenate([values[begin:end] for begin, end in own])
        setattr(module, name, paddle.to_tensor(np.ascontiguousarray(part.T)))


def _packing(table: OpTable, kind: type, pack: Callable[[Any, Mapping[str, Source], Store], None]) -> Pack:
    """Return the table's `pack` with another function for modules of one kind."""

    def packing(module: Module, sources: Mapping[str, Source], store: Store) -> None:
        (pack if isinstance(module, kind) else table.pack)(module, sources, store)

    return packing


def _with_norm(table: OpTable) -> OpTable:
    def rms_norm(x: paddle.Tensor, module: Norm) -> paddle.Tensor:
        return fused.fused_rms_norm(x, module.weight, None, module.epsilon, 1)[0]

    def add_rms_norm(x: paddle.Tensor, residual: paddle.Tensor, module: Norm) -> tuple[paddle.Tensor, paddle.Tensor]:
        y, total = fused.fused_rms_norm(x, module.weight, None, module.epsilon, 1, residual=residual)
        return y, total

    return replace(table, rms_norm=rms_norm, add_rms_norm=add_rms_norm)


@dataclass(frozen=True, slots=True)
class PairedAngles(reference.Angles):
    """Angles of pairs: each element with that of the other half, or with a neighbour. Sines are without sign, as the fused op
    expects."""

    are_neighbours: bool

    def rotated(self, x: paddle.Tensor) -> paddle.Tensor:
        cosines, sines = self.cosines.unsqueeze(0), self.sines.unsqueeze(0)
        return fused.fused_rotary_position_embedding(
            x.unsqueeze(0), sin=sines, cos=cosines, use_neox_rotary_style=self.are_neighbours
        )[0].squeeze(0)


class Paired(NamedTuple):
    """Partners of a Rotary that rotates each element with the other half, or with its neighbour."""

    partners: paddle.Tensor
    are_neighbours: bool


def _with_rotary(table: OpTable) -> OpTable:
    def pack(module: Rotary, sources: Mapping[str, Source], store: Store) -> None:
        table.pack(module, sources, store)
        partners = np.asarray(sources["partners"]())
        places = np.arange(len(partners))
        styles = {False: (places + len(places) // 2) % max(len(places), 1), True: places ^ 1}
        found = [are_neighbours for are_neighbours, expected in styles.items() if np.array_equal(partners, expected)]
        if found and not module.is_by_row:
            sines = np.asarray(sources["sines"]())
            module.sines = paddle.to_tensor(np.where(places < partners, -sines, sines))
            module.partners = Paired(module.partners, found[0])

    def rotary_angles(inputs: Inputs, module: Rotary) -> reference.Angles:
        angles: reference.Angles = table.rotary_angles(inputs, module)
        if not isinstance(angles.partners, Paired):
            return angles
        return PairedAngles(angles.cosines, angles.sines, *angles.partners)

    return replace(table, rotary_angles=rotary_angles, pack=_packing(table, Rotary, pack))


def _with_activation(table: OpTable) -> OpTable:
    def activate_and_multiply(
        x: paddle.Tensor | reference.Cut, activation: str, clamp: GateClamp | None = None
    ) -> paddle.Tensor | reference.Cut:
        if activation != "silu" or clamp is not None:
            found: paddle.Tensor | reference.Cut = table.activate_and_multiply(x, activation, clamp)
            return found
        y = swiglu(reference.own_columns(x))
        return reference.Cut(y, x.begin, x.width // 2) if isinstance(x, reference.Cut) else y

    return replace(table, activate_and_multiply=activate_and_multiply)


REFERENCE = Candidate("reference", lambda table: table)

# By the name of the checked op; the last one is always the table's own op, or the host.
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "linear": (Candidate("tiles_of_512", tiled_linear(512)), Candidate("tiles_of_128", tiled_linear()), REFERENCE),
    "rms_norm": (Candidate("fused_rms_norm", _with_norm), REFERENCE),
    "rotary": (Candidate("fused_rotary_position_embedding", _with_rotary), REFERENCE),
    "activation": (Candidate("swiglu", _with_activation), REFERENCE),
    "draw": (Candidate("largest", lambda table: table), Candidate("host", lambda table: replace(table, drawing=None))),
}
