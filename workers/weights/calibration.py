"""Statistics of a model over a text: the mean square of each input of each linear, and the file that has them.

Written by `tokamak calibrate`, read by the loader (--quantization-calibration) before it rounds. A safetensors file with
one float32 vector [inputs] for each linear, under the name of its (first) tensor in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from engine.checkpoint.files import PARTIAL
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from ops.modules import Linear, LinearPart
from shm.blake2 import blake2b
from workers.weights.declaration import Weights
from workers.weights.safetensors import SafetensorsFile, header_of

FORMAT = "tokamak-calibration-1"
SMOOTHING = 0.01  # share of the mean that is added to each importance, so that inputs that were never used count a little
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_MAX_LISTED = 3


class Calibration(msgspec.Struct, frozen=True):
    """A file of statistics. `digest`: that of its contents when the engine started (`digest_of_file`)."""

    path: Path
    digest: str

    def apply(self, weights: Weights, config: ModelConfig) -> None:
        """Set the importances of the linears that the file knows. Raises CheckpointError if it is damaged, or of another
        model."""
        squares = self._read()
        linears = {name_of(linear): linear for linear in calibrated(weights)}
        problems = [f"{name} is unknown" for name in squares if name not in linears]
        for name, linear in linears.items():
            found = squares.get(name)
            if found is None:
                problems += [f"{name} is missing"] if _is_in_trunk(name, config) else []
            elif found.shape != (linear.num_inputs,):
                problems.append(f"{name} has shape {list(found.shape)}, expected {[linear.num_inputs]}")
            elif not (np.isfinite(found).all() and (found >= 0).all()):
                problems.append(f"{name} has values that are negative, NaN or infinite")
            else:
                linear.importances = importances_of(found)
        if problems:
            rest = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
            raise CheckpointError(
                f"{self.path} does not have the statistics of this {config.architecture} model: "
                f"{'; '.join([*problems[:_MAX_LISTED], *rest])}; write it again with `tokamak calibrate`"
            )

    def _read(self) -> dict[str, np.ndarray]:
        file = SafetensorsFile(self.path)
        if file.metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.path} has the format {str(file.metadata.get('format'))[:40]!r}, expected {FORMAT!r}; write it with "
                "`tokamak calibrate`"
            )
        squares = {name: np.array(tensor.read()) for name, tensor in file.tensors.items()}
        found = blake2b(file.data, digest_size=16).hexdigest()
        file.mapped.check()
        if found != self.digest:
            raise CheckpointError(f"{self.path} changed since the engine started; restore it, or restart the engine")
        return squares


def importances_of(squares: np.ndarray) -> np.ndarray:
    """Return what an error of rounding costs at each input, 1 on average, from the mean squares of the inputs."""
    mean = squares.mean(dtype=np.float64)
    if mean == 0:
        return np.ones_like(squares)
    importances: np.ndarray = ((squares / mean + SMOOTHING) / (1 + SMOOTHING)).astype(np.float32)
    return importances


def name_of(linear: Linear) -> str:
    """Return the name of a linear's statistics. Tensors of one linear have the same inputs."""
    return linear.name if isinstance(linear, LinearPart) else linear.names[0]


def calibrated(weights: Weights) -> Iterable[Linear]:
    """Return the linears that statistics may name: those of encoders are rounded without."""
    for linears in weights.formatted():
        if not any(linears[0] is linear for linear in weights.encoder_linears):
            yield from linears


def write_calibration(path: Path, squares: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write the mean squares. Raises OSError."""
    header = header_of(((name, "F32", values.shape) for name, values in squares.items()), {"format": FORMAT, **metadata})
    data = [np.ascontiguousarray(values, np.float32).tobytes() for values in squares.values()]
    unfinished = path.with_name(f"{path.name}{PARTIAL}")
    unfinished.write_bytes(b"".join([header, *data]))
    unfinished.replace(path)


def _is_in_trunk(name: str, config: ModelConfig) -> bool:
    """Whether the text went through the linear: it is in a layer, but not in an MTP layer."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) < config.num_layers
