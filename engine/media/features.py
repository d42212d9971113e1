"""Features that a client encoded itself: rows of an npy or safetensors file, never a pickle.

Both formats have a small header with shape and type, followed by numbers; nothing in them is executed.
"""

from __future__ import annotations

import json
import math
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib import format as npy

from engine.checkpoint.vision_config import VisionConfig
from engine.errors import RequestError
from engine.media.refusal import refuse

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_HEADER_BYTES = 1 << 16
_BFLOAT16 = "BF16"
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", _BFLOAT16: "<u2"}
CODE = "invalid_features"


def checked_grid(kind: str, grid: tuple[int, int, int] | None, vision: VisionConfig) -> tuple[int, int, int]:
    """Return the patches in time, height and width given by the client. Raises RequestError if they are missing or not possible
    for the kind."""
    merge, rows = vision.spatial_merge_size, vision.temporal_merge_size if kind == "video" else 1
    if grid is None:
        raise refuse(f"{kind}_grid_thw is missing; give [time, height, width] of the features' patches", CODE)
    if len(grid) != 3 or min(grid) < 1 or max(grid) > 1 << 20 or (kind == "image" and grid[0] != 1):
        raise refuse(
            f"{kind}_grid_thw is {list(grid)}, expected three positive numbers, the first of them 1 for an image", CODE
        )
    if grid[0] % rows or grid[1] % merge or grid[2] % merge:
        raise refuse(f"{kind}_grid_thw is {list(grid)}, expected multiples of {[rows, merge, merge]}", CODE)
    return grid


def read_features(data: bytes | bytearray, num_rows: int, width: int) -> NDArray[np.float32]:
    """Return float32 [num_rows, width]. Raises RequestError if the file has another format or content."""
    try:
        found = _read_npy(data) if data[:6] == npy.MAGIC_PREFIX else _read_safetensors(data)
    except RequestError:
        raise
    except MemoryError:
        raise refuse("the features exceed the memory limit of a file", CODE) from None
    except Exception as error:  # any error of a parser is caused by the client's file
        raise refuse(f"the features cannot be read: {error or type(error).__name__}", CODE) from None
    if found.shape != (num_rows, width):
        raise refuse(f"the features are {list(found.shape)}, expected {[num_rows, width]} (tokens, width of the model)", CODE)
    if not np.isfinite(found).all():
        raise refuse("the features contain NaN or infinity, expected finite numbers", CODE)
    return found


def _read_npy(data: bytes | bytearray) -> NDArray[np.float32]:
    file = BytesIO(data)
    version = npy.read_magic(file)
    if version == (1, 0):
        shape, is_fortran, dtype = npy.read_array_header_1_0(file, max_header_size=MAX_HEADER_BYTES)
    elif version == (2, 0):
        shape, is_fortran, dtype = npy.read_array_header_2_0(file, max_header_size=MAX_HEADER_BYTES)
    else:
        raise refuse(f"the npy file has version {version}, expected 1.0 or 2.0", CODE)
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise refuse(
            f"the features are of type {dtype}, expected float16, float32 or float64; Python objects are not supported", CODE
        )
    return _shaped(data, file.tell(), dtype, shape, "F" if is_fortran else "C")


def _read_safetensors(data: bytes | bytearray) -> NDArray[np.float32]:
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 10 or data[8:9] != b"{" or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise refuse("the features are neither npy nor safetensors; pickle and npz are not supported", CODE)
    header = json.loads(bytes(data[8 : 8 + header_bytes]))
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    if len(tensors) != 1:
        raise refuse(f"the safetensors file has {len(tensors)} tensors, expected one", CODE)
    dtype, shape, (start, end) = tensors[0]["dtype"], tuple(tensors[0]["shape"]), tensors[0]["data_offsets"]
    if dtype not in _TYPES:
        raise refuse(f"the features are of type {dtype}, expected {', '.join(_TYPES)}", CODE)
    if (start, end) != (0, len(data) - 8 - header_bytes):
        raise refuse(f"the tensor covers bytes {start} to {end} of {len(data) - 8 - header_bytes}, expected all of them", CODE)
    found = _shaped(data, 8 + header_bytes, np.dtype(_TYPES[dtype]), shape, "C", is_bfloat16=dtype == _BFLOAT16)
    return found


def _shaped(
    data: bytes | bytearray,
    start: int,
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    order: str,
    is_bfloat16: bool = False,
) -> NDArray[np.float32]:
    expected = math.prod(shape) * dtype.itemsize
    if len(data) - start != expected:
        raise refuse(f"the file has {len(data) - start} bytes of data, but shape {list(shape)} needs {expected}", CODE)
    flat = np.frombuffer(data, dtype, offset=start)
    if is_bfloat16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # float64 values beyond float32 become infinity, which is rejected
        found: NDArray[np.float32] = flat.reshape(shape, order="F" if order == "F" else "C").astype(np.float32)
    return found
