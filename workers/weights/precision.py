"""Format of each matrix, from the options and the stored format. A pure decision, called by the loader before it packs.

- A linear that is stored as integers keeps them. Parts of one array (q, k, v; gate, up; experts) that are stored differently
  get the narrowest format that represents all of them exactly. Without one (8-bit floats; groups that do not follow the order
  of inputs, or have a size without kernels; integers beside floats) they become floats of the dtype.
- Others are rounded as --quantization says: `wint8` to 8 bits, one scale per output; `wint4` to 4 bits in groups of 64
  inputs (32 if 64 does not divide them; else like wint8) with folded scales, the head to 8 bits as for wint8, and also the
  first and the last layer of a deep model: rounding costs most there. --quantization-group-size sets the groups of both; those
  of 8 bits have scales of 16.
- Routers of experts are float32, and so are patch embeddings.
- Other linears of a vision encoder are rounded as --vision-quantization says.
- Linears with a separate part per head are floats of the dtype.
- Embeddings are floats of the dtype, or have the format of the head if they are shared with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.errors import CheckpointError
from ops.modules import Linear, LinearPart
from ops.weight_format import BFLOAT16, FLOAT32, WeightFormat
from workers.weights.declaration import Weights
from workers.weights.formats.integers import common_format
from workers.weights.formats.tensor import Kept

_WINT4_GROUPS = (64, 32)
_DEEP = 16  # layers from which on the first and the last stay at 8 bits with wint4
_LAYER = re.compile(r"\.layers\.(\d+)\.")
ROUNDING = 3  # version of the rounding, part of the keys of packed weights
_CLASS_HEADS = (
    "score",
    "classifier",
    "classifier.dense",
    "classifier.out_proj",
    "pooler.dense",
)  # small and sensitive to rounding: float32
_HEADS = ("lm_head", "shared_head.head")  # of the trunk, and of an MTP layer


class Precision(msgspec.Struct, frozen=True):
    """Precision requested in EngineConfig."""

    dtype: str = "float32"
    quantization: str = "none"
    vision_quantization: str = "none"  # for linears of an encoder
    group_size: int = 0  # inputs with one scale; 0: the default of the quantization

    @property
    def float_format(self) -> WeightFormat:
        return BFLOAT16 if self.dtype == "bfloat16" else FLOAT32


def precision_of(config: EngineConfig) -> Precision:
    return Precision(config.dtype, config.quantization, config.vision_quantization, config.quantization_group_size)


def choose_formats(weights: Weights, precision: Precision, kept: Callable[[str], Kept]) -> str:
    """Set the format of each linear and embedding. `kept` returns how a tensor of the checkpoint can be kept as stored. Return
    one line about the stored integers, or an empty string. Raises CheckpointError if they should be rounded."""
    embeddings = {embedding.name for embedding in weights.embeddings}
    of_encoder = Precision(precision.dtype, precision.vision_quantization)
    sensitive = _sensitive_layers(weights) if precision.quantization == "wint4" else ()
    own = {id(linear) for linear in weights.encoder_linears}
    outcomes: Counter[str] = Counter()
    formats = {}
    for group in weights.formatted():
        linear = group[0]
        stored = [kept(f"{name}.weight") for each in group for name in each.names]
        if isinstance(linear, LinearPart):
            stored = [part and "the inputs are two tensors" for part in stored]
        asked = of_encoder if id(linear) in own else precision
        is_head = linear.name.endswith(_HEADS) or linear.name in embeddings
        is_head |= _layer_of(linear.name) in sensitive and id(linear) not in own
        if all(part is None for part in stored):
            format = FLOAT32 if linear.name in _CLASS_HEADS else _rounded(linear, is_head, asked)
        elif asked.quantization != "none":
            option = "--vision-quantization" if id(linear) in own else "--quantization"
            raise CheckpointError(f"{linear.name} is already quantized; remove {option} {asked.quantization}")
        else:
            format, outcome = _stored(stored, precision)
            outcomes[outcome] += 1
        for each in group:
            each.format = format
        formats[linear.name] = format
    for part in weights.head_linears:
        part.format = precision.float_format
    for embedding in weights.embeddings:
        embedding.format = formats.get(embedding.name, precision.float_format)
    return "; ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())


def _layer_of(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def _sensitive_layers(weights: Weights) -> tuple[int, ...]:
    """Return the first and the last layer of a deep model."""
    last = max((_layer_of(linear.name) for linear in weights.linears if linear not in weights.encoder_linears), default=-1)
    return (0, last) if last + 1 >= _DEEP else ()


def _rounded(linear: Linear, is_sensitive: bool, precision: Precision) -> WeightFormat:
    if precision.quantization == "none":
        return precision.float_format
    size = precision.group_size
    fitting = [each for each in (size, *_WINT4_GROUPS) if each and linear.num_inputs % each == 0]
    if precision.quantization == "wint8" or is_sensitive or not fitting:
        return WeightFormat("int8", size, scales="bfloat16") if size and linear.num_inputs % size == 0 else WeightFormat("int8")
    return WeightFormat("int4", fitting[0], is_folded=True)


def _stored(parts: list[Kept], precision: Precision) -> tuple[WeightFormat, str]:
    """Return the common format of `parts`, and a few words for the log."""
    floats = precision.float_format
    formats = [part for part in parts if isinstance(part, WeightFormat)]
    if len(formats) < len(parts):
        reasons = dict.fromkeys(part or "parts stored as floats" for part in parts if not isinstance(part, WeightFormat))
        return floats, f"as {floats.kind} ({', '.join(reasons)})"
    format = common_format(formats)
    if format is None:
        return floats, f"as {floats.kind} ({' beside '.join(dict.fromkeys(map(shown, formats)))})"
    if all(part == format for part in formats):
        return format, f"as stored ({shown(format)})"
    different = dict.fromkeys(shown(part) for part in formats)
    return format, f"as {shown(format)} ({' beside '.join(different)})"


def shown(format: WeightFormat) -> str:
    groups = f", groups of {format.group_size}" if format.group_size else ""
    return f"{format.kind}{groups}{', offsets' if format.has_offsets else ''}"
