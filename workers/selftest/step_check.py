"""Whole steps on the rank's device, checked after weights are loaded and before the rank serves.

An extension of the runner with `--ops fused` and `--ops cuda`.
"""

from __future__ import annotations

import logging

import numpy as np

from engine.config import EngineConfig
from engine.errors import OptionError
from workers.devices.device import Device
from workers.engine.extension import Extension
from workers.models import Model
from workers.models.loading import LoadedModel
from workers.selftest.self_test import SelfTest

_LOG = logging.getLogger(__name__)


class StepCheck(Extension):
    """Checks the first weights that are loaded."""

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self._config, self._device = config, device
        self._is_done = False

    def on_load(self, loaded: LoadedModel, version: int) -> None:
        if not self._is_done:
            limit, allows_variant = self._config.max_model_len, self._config.allow_variant_ops
            check_steps(self._device, loaded.model, self._config.kv_cache_dtype, limit, allows_variant=allows_variant)
            self._is_done = True


def check_steps(device: Device, model: Model, kv_dtype: str, max_model_len: int, *, allows_variant: bool) -> None:
    """Compare a whole prompt with its chunks beside others: the bits after the last layer must be equal for any ops, including
    attention and experts. Raises OptionError if they differ."""
    whole, in_parts = SelfTest(device, device.ops, model.config, kv_dtype, max_model_len).hidden_of(model)
    if np.array_equal(whole, in_parts):
        return
    rows = np.flatnonzero((whole != in_parts).any(axis=1))
    where = f"{len(rows)} of {len(whole)} rows of a prompt, the first at position {rows[0]},"
    text = f"--ops {device.ops.name}: on {device.capabilities.place} {where} have different bits in chunks of a batch"
    if not allows_variant:
        raise OptionError(f"{text}; use --ops reference, or --allow-variant-ops")
    _LOG.warning(text)
