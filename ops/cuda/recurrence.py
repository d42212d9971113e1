"""Ops of recurrent layers in CUDA's table: convolutions, delta rule, state spaces, and the norm with a gate.

Every rank computes all heads: tensor parallel ranks do not divide them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ops.cuda.array import CudaArray
from ops.cuda.operands import TYPES
from ops.modules import Convolution, DeltaRule, GatedNorm, LayerState, StateCache, StateSpaces, Tensor
from ops.table import Inputs


class RecurrentOps:
    """The ops. `run` runs a row and returns its results; `convert` returns a tensor in another type of floats; `dtype_of` its
    type."""

    def __init__(
        self,
        run: Callable[..., dict[str, CudaArray]],
        convert: Callable[[Tensor, str], Tensor],
        dtype_of: Callable[[Tensor], str],
    ) -> None:
        self._run, self._convert, self._dtype_of = run, convert, dtype_of

    def convolve(self, inputs: Inputs, x: Tensor, module: Convolution, places: LayerState, cache: StateCache) -> CudaArray:
        assert not module.columns, f"{module.name}: ranks do not divide the channels"
        return self._run(
            "Convolve",
            type=TYPES[self._dtype_of(x)],
            states=_states(inputs, cache),
            x=x,
            weight=module.weight,
            bias=module.bias,
            num_rows=x.shape[0],
            stride=x.shape[1],
            first=module.first,
            channels=module.channels,
            taps=module.kernel,
            is_activated=module.activation == "silu",
            is_gated=module.is_gated,
            window_at=places.window,
            log_at=places.window_log,
        )["y"]

    def delta_rule(
        self,
        inputs: Inputs,
        qkv: Tensor,
        decays: Tensor,
        betas: Tensor,
        module: DeltaRule,
        places: LayerState,
        cache: StateCache,
    ) -> CudaArray:
        sizes = {
            "heads": module.num_value_heads,
            "key_heads": module.num_key_heads,
            "key_dim": module.key_dim,
            "value_dim": module.value_dim,
            "num_decays": module.num_decays,
        }
        betas = self._convert(betas, self._dtype_of(qkv))
        of_betas = {"betas": betas, "beta_stride": betas.shape[1], "beta_first": module.beta_first}
        options = {"skips": None, "epsilon": module.epsilon, "least": 0.0, "most": 0.0}
        return self._recur(inputs, qkv, decays, module, places, cache, **sizes, **of_betas, **options)

    def state_space(
        self, inputs: Inputs, x: Tensor, dt: Tensor, module: StateSpaces, places: LayerState, cache: StateCache
    ) -> CudaArray:
        sizes = {
            "heads": module.num_heads,
            "key_heads": module.num_groups,
            "key_dim": module.state_dim,
            "value_dim": module.head_dim,
            "num_decays": 1,
        }
        options = {"betas": None, "beta_stride": 0, "beta_first": 0, "skips": module.skips, "epsilon": 0.0}
        limits = {"least": module.least, "most": module.most}
        return self._recur(inputs, x, dt, module, places, cache, **sizes, **options, **limits)

    def _recur(
        self,
        inputs: Inputs,
        x: Tensor,
        decays: Tensor,
        module: DeltaRule | StateSpaces,
        places: LayerState,
        cache: StateCache,
        **others: Any,
    ) -> CudaArray:
        assert module.own is None, f"{module.names[0]}: ranks do not divide the heads"
        decays = self._convert(decays, self._dtype_of(x))
        return self._run(
            "Recur",
            type=TYPES[self._dtype_of(x)],
            states=_states(inputs, cache),
            x=x,
            decays=decays,
            rates=module.weight,
            biases=module.bias,
            num_rows=x.shape[0],
            x_stride=x.shape[1],
            decay_stride=decays.shape[1],
            first=module.first,
            decay_first=module.decay_first,
            matrix_at=places.matrix,
            log_at=places.matrix_log,
            log_width=module.log_width,
            **others,
        )["y"]

    def gated_norm(self, x: Tensor, gate: Tensor | None, module: GatedNorm) -> CudaArray:
        return self._run(
            "GateAndNorm",
            type=TYPES[self._dtype_of(x)],
            x=x,
            gate=None if gate is None else self._convert(gate, self._dtype_of(x)),
            weight=module.weight if module.has_norm else None,
            epsilon=module.epsilon,
            num_rows=x.shape[0],
            width=module.width,
            group=module.group,
            weight_width=module.weight_width if module.has_norm else 0,
            gate_stride=0 if gate is None else gate.shape[1],
            gate_first=module.gate_first,
            is_gated_first=module.is_gated_first,
            is_sigmoid=module.activation == "sigmoid",
        )["y"]


def _states(inputs: Inputs, cache: StateCache) -> dict[str, Any]:
    """Return `States` of operands.h."""
    return {
        "memory": cache.memory,
        "offsets": inputs.sequence_offsets,
        "starts": inputs.sequence_starts,
        "sequences": inputs.states,
        "slot_bytes": cache.memory.shape[1],
        "num_sequences": len(inputs.states),
    }
