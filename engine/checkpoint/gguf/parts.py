"""A model in one GGUF file, or in several: name-00001-of-00003.gguf and so on, as llama-gguf-split writes them.

Called by `convert.py` in the launcher and by the worker's loader. Every part has its number, the number of parts and the number
of all tensors in its metadata; the rest of the metadata is in the first one. A part's tensors are complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.files import MappedFile
from engine.checkpoint.gguf.file import LINK_NAME, GgufFile, GgufTensor
from engine.checkpoint.json_fields import JsonOptions
from engine.errors import CheckpointError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_MAX_LISTED = 5  # names in an error
_SHARED = "general.architecture"  # usually only in the first part; others must agree


def stem_of(name: str) -> str:
    """Return a file's name without its suffix and without the number of its part."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    match = _PART.fullmatch(stem)
    return match["stem"] if match else stem


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts, from that of any, by its name; the path alone if it is no part's."""
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 0 < number <= count:
        raise CheckpointError(f"{path.name}: part {number} of {count} does not exist; rename the file")
    return [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}{path.suffix}") for number in range(1, count + 1)]


def link_names(count: int) -> list[str]:
    """Return the names of the links to the parts in a converted checkpoint directory."""
    return [LINK_NAME, *(f"{LINK_NAME}.{number:05d}" for number in range(2, count + 1))]


class GgufModel:
    """The parts of a model: `metadata` of the first, `tensors` of all. Raises CheckpointError."""

    def __init__(self, paths: Sequence[Path]) -> None:
        missing = [path.name for path in paths if not path.exists()]
        if missing and len(paths) > 1:
            listed = ", ".join(missing[:_MAX_LISTED]) + (", ..." if len(missing) > _MAX_LISTED else "")
            raise CheckpointError(f"{paths[0].parent} lacks {listed}; the model has {len(paths)} parts")
        self.path = paths[0]
        self._parts = [GgufFile(path) for path in paths]
        self.metadata: dict[str, Any] = self._parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        num_tensors = [self._checked(index) for index in range(len(paths))]
        for part in self._parts:
            again = self.tensors.keys() & part.tensors.keys()
            if again:
                raise self._mixed(part, f"{min(again)} is also in another part")
            self.tensors |= part.tensors
        if len(paths) > 1 and num_tensors[0] != len(self.tensors):
            raise self._mixed(self._parts[0], f"split.tensors.count is {num_tensors[0]}, the parts have {len(self.tensors)}")

    @staticmethod
    def of_checkpoint(path: Path) -> GgufModel | None:
        """Return the model from which the checkpoint directory `path` was converted; None: it has its own files."""
        if not (path / LINK_NAME).is_symlink():
            return None
        return GgufModel([path / LINK_NAME, *sorted(path.glob(f"{LINK_NAME}.*"))])

    @property
    def mapped(self) -> list[MappedFile]:
        return [part.mapped for part in self._parts]

    def _checked(self, index: int) -> int:
        """Check a part's place; return the number of all tensors that it states."""
        part, count = self._parts[index], len(self._parts)
        options = JsonOptions(part.metadata, part.path)
        stated = options.count("split.count", 1, least=0) or 1
        if stated > 1 and count == 1:
            raise options.error(
                "split.count",
                f"the file is one of {stated} parts; rename the parts to NAME-00001-of-{stated:05d}.gguf and so on, or merge "
                "them (llama-gguf-split --merge)",
            )
        if stated != count:
            raise options.error("split.count", f"{stated} differs from the number of parts in the file's name, {count}")
        number = options.count("split.no", 0, least=0)
        if number != index:
            raise options.error("split.no", f"{number + 1} is the part's number, but its name says {index + 1}")
        num_tensors = options.count("split.tensors.count", 0, least=0)
        first = self._parts[0]
        for key, value in ((_SHARED, part.metadata.get(_SHARED)), ("split.tensors.count", num_tensors)):
            expected = first.metadata.get(key, value)
            if value is not None and value != expected:
                raise self._mixed(part, f"{key} is {value!r}, and {expected!r} in {first.path.name}")
        return num_tensors

    def _mixed(self, part: GgufFile, text: str) -> CheckpointError:
        return CheckpointError(
            f"{part.path} does not belong to the same model as the other parts: {text}; download all parts again"
        )
