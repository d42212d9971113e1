"""Ops of a model, checked on the device when the rank starts, before its weights are loaded.

Called by `workers/assembly.py`, for `--ops fused` and `--ops cuda`. `ops/paddle/choice.py` checks fused ops and `row_check.py`
checks CUDA ops; this module chooses the shapes and reports the results.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import msgspec

from engine.checkpoint.files import user_cache
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import OptionError
from ops.table import OpTable
from workers.devices.capabilities import DeviceError, FullDeviceError
from workers.devices.device import Device
from workers.models import declare_model
from workers.rank_group.peers import Peers
from workers.weights.declaration import Weights
from workers.weights.precision import Precision, precision_of
from workers.weights.rotary import rotary_tables

_LOG = logging.getLogger(__name__)
_NUM_POSITIONS = 512  # checked positions of a rotation
_UNABLE = (RuntimeError, ValueError, TypeError, OSError, MemoryError, DeviceError)


class ChosenOps(msgspec.Struct, frozen=True):
    ops: OpTable
    fallbacks: tuple[tuple[str, str], ...] = ()  # op, and the rejected candidate


def settle_ops(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    peers: Peers,
    *,
    has_encoder: bool,
    has_drafts: bool,
) -> None:
    """Set the fused ops of `device` that are correct on it for `model`, or check its CUDA ops. Raises OptionError if an op has
    no correct candidate."""
    if config.ops == "cuda":
        check_rows(device, model, precision_of(config), config.kv_cache_dtype)
    if config.ops != "fused":
        return
    _, declared = declare_model(model, peers.share, has_encoder=has_encoder, has_drafts=has_drafts)
    name, allows_variant = device.capabilities.place, config.allow_variant_ops
    chosen = choose_ops(device.ops, name, model, declared, allows_variant=allows_variant)
    device.ops, device.fallbacks = chosen.ops, chosen.fallbacks


def check_rows(device: Device, config: ModelConfig, precision: Precision, kv_dtype: str) -> None:
    """Check CUDA ops with the shapes of the model, once for a card, a driver and kernels. Raises OptionError if they are not
    correct on this card."""
    from ops.cuda.library import RowError
    from workers.selftest.row_check import fault_of_drawing, fault_of_rows, small_model

    fingerprint: str = getattr(device, "fingerprint", "")
    key = repr((fingerprint, small_model(config), config.vocab_size, precision, kv_dtype)).encode()
    passed = user_cache() / "checked-rows" / hashlib.blake2b(key, digest_size=16).hexdigest()
    if fingerprint and passed.exists():
        return
    try:
        fault = fault_of_rows(device, config, precision, kv_dtype) or fault_of_drawing(device, config.vocab_size)
    except FullDeviceError:
        raise
    except (*_UNABLE, RowError) as error:
        fault = f"CUDA ops fail: {error}"
    if fault:
        raise OptionError(f"--ops cuda: on {device.capabilities.place} {fault}; use --ops fused, with Paddle")
    if fingerprint:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def choose_ops(ops: OpTable, name: str, config: ModelConfig, weights: Weights, *, allows_variant: bool = False) -> ChosenOps:
    """Return `ops` with correct candidates on the device `name`, for the modules that a model declares. Raises OptionError if
    an op has none."""
    from ops.paddle import choice  # needs Paddle, which the device has already imported

    linears = [*weights.linears, *weights.encoder_linears, *weights.patch_linears]
    distinct: dict[Any, choice.Case] = {}
    for linear in linears:
        distinct[linear.num_inputs, linear.width, linear.columns, linear.has_bias] = choice.linear_case(linear)
    for norm in weights.norms:
        distinct[norm.width, norm.epsilon] = choice.norm_case(norm)
    for rope, rotary in weights.rotaries:
        if not rotary.is_by_row:
            distinct[rotary.head_dim, rope] = choice.rotary_case(rotary, *rotary_tables(rope, rotary.head_dim, _NUM_POSITIONS))
    if config.activation == "silu":
        distinct["silu"] = choice.activation_case("silu", config.intermediate_size)
    if ops.drawing is not None:
        distinct["draw"] = choice.draw_case(config.vocab_size)
    try:
        chosen = choice.choose(ops, distinct.values(), allows_variant=allows_variant)
    except choice.NoCandidateError as error:
        raise OptionError(
            f"--ops fused: on {name} answers would be wrong or depend on their batch: {error}; use --ops reference, or "
            "--allow-variant-ops if they only depend on the batch"
        ) from error
    for fallback in chosen.fallbacks:
        _LOG.warning("%s: %s is not used on %s: %s", fallback.op, fallback.candidate, name, fallback.reason)
    _LOG.info("fused ops on %s: %s", name, ", ".join(f"{op} {candidate}" for op, candidate in chosen.taken.items()))
    return ChosenOps(chosen.ops, tuple((fallback.op, fallback.candidate) for fallback in chosen.fallbacks))
