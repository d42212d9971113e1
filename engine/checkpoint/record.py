"""Everything that a start read from its checkpoint except the weights. It belongs to the run.

Created once by `engine/options/resolve.py`, and written beside the run's manifest. Every life of every actor reads it there, so
that a restarted actor behaves as before, even if the checkpoint's directory was overwritten, truncated or removed. Weights may
be replaced in place; their shape (`ModelConfig.of_same_shape`) and the tokenizer may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.checkpoint.files import read_file
from engine.checkpoint.model_config import GENERATION_CONFIG, ModelConfig
from engine.checkpoint.processor_files import IMAGE_PROCESSOR, PROCESSOR, VIDEO_PROCESSOR
from engine.errors import CheckpointError, TokamakError

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tiktoken.model")  # the first existing one is used
TEMPLATES = "additional_chat_templates"
FONTS = ("*.ttf", "*.otf")  # fonts for drawing times on a video's frames
TOKENIZER_FILES = (
    *VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja"),
)  # in addition to the templates in TEMPLATES
_OTHERS = (*TOKENIZER_FILES[len(VOCABULARIES) :], GENERATION_CONFIG, IMAGE_PROCESSOR, PROCESSOR, VIDEO_PROCESSOR)


class ModelRecord(msgspec.Struct, frozen=True):
    """The model's configuration, and the contents of the small files by their names in the directory `path`."""

    path: str
    config: ModelConfig
    files: dict[str, bytes]

    @staticmethod
    def read(path: Path) -> ModelRecord:
        """Read the checkpoint directory `path`. Raises CheckpointError that names a file that is wrong or cannot be read."""
        return ModelRecord(str(path), ModelConfig.read(path), dict(small_files(path)))

    @staticmethod
    def of_run(path: Path) -> ModelRecord:
        """Read the run's document at `path`."""
        try:
            return msgspec.msgpack.decode(read_file(path), type=ModelRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise TokamakError(f"cannot read {path}: {error}; restart the engine") from error

    def encode(self) -> bytes:
        """Return the document that `of_run` reads."""
        return msgspec.msgpack.encode(self)


def small_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents; any may be missing."""
    vocabulary = next((name for name in VOCABULARIES if (path / name).exists()), None)
    templates = sorted(f"{TEMPLATES}/{file.name}" for file in path.glob(f"{TEMPLATES}/*.jinja"))
    fonts = sorted(file.name for pattern in FONTS for file in path.glob(pattern))
    for name in (*([vocabulary] if vocabulary else []), *_OTHERS, *templates, *fonts):
        try:
            yield name, read_file(path / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from error
