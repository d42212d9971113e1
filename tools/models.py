"""`tokamak models`: the models on this machine (embedded, downloaded from the hub, packed for its kernels), and their removal.

Called by tools/cli.py, in its own process. The hub's cache is that of huggingface_hub, shared with other programs. Packed
weights in use by an engine are not removed. Exit codes: 0 done, 1 not done, 2 bad arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.files import user_cache
from engine.checkpoint.gguf.file import LINK_NAME
from engine.checkpoint.gguf.parts import stem_of
from engine.errors import MissingExtraError, TokamakError
from engine.installation import PACKAGES, command
from engine.options.argument_parser import ArgumentParser
from engine.options.resolve import EMBEDDED_MODEL_NAMES
from tools import units
from tools.demo import MODELS
from tools.exits import exit_code

_CELLS = ("{:<{}}", "{:<{}}", "{:>{}}", "{:<{}}", "{:<{}}")
_SERVED_BY = {"text": "serve", "vision": "serve --demo vision"}


class Stored(msgspec.Struct, frozen=True):
    """Model on disk. `rm` takes the name or the id."""

    name: str
    id: str  # suffix of packed weights
    num_bytes: int
    used_s: float  # seconds since the epoch
    about: str
    path: Path
    revisions: tuple[str, ...] = ()  # directory of a hub repository
    is_from_modelscope: bool = False
    is_embedded: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return exit_code("tokamak models", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    found = [*_embedded(), *_downloaded(), *_from_modelscope(), *_packed(options.weight_cache_dir)]
    if options.command != "rm":
        print("\n".join(_lines(found)))
        return 0
    chosen = [stored for stored in found if not {stored.name, stored.id}.isdisjoint(options.names)]
    missing = [name for name in options.names if not any(name in (stored.name, stored.id) for stored in chosen)]
    if missing:
        print(
            (f"tokamak models: error: no model is named {', '.join(map(repr, missing))}; run `tokamak models` for a list"),
            file=sys.stderr,
        )
        return 1
    removable = [stored for stored in chosen if not stored.is_embedded]
    if not removable:
        print(f"tokamak models: error: {chosen[0].name} is part of Tokamak and cannot be removed", file=sys.stderr)
        return 1
    return max([_remove(stored) for stored in removable])


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="tokamak models", description=(__doc__ or "").partition("\n")[0])
    cache = os.environ.get("TOKAMAK_WEIGHT_CACHE_DIR") or user_cache() / "weights"
    parser.add_argument("--weight-cache-dir", type=Path, default=Path(cache), metavar="DIR", help="default: %(default)s")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="list the models (the default)")
    remove = commands.add_parser("rm", help="remove downloaded and packed models")
    remove.add_argument(
        "names", nargs="+", metavar="NAME|ID", help="name or id from the list; a name removes all models that have it"
    )
    return parser


def _lines(found: Sequence[Stored]) -> list[str]:
    rows = [("name", "id", "size", "last used", "description")]
    for stored in sorted(found, key=lambda one: (not one.is_embedded, one.name, -one.used_s)):
        age = "" if stored.is_embedded else f"{units.seconds(max(0.0, time.time() - stored.used_s))} ago"
        rows.append((stored.name, stored.id, units.size(stored.num_bytes), age, stored.about))
    rows.append(("", "", units.size(sum(stored.num_bytes for stored in found)), "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.format, _CELLS, row, widths)).rstrip() for row in rows]


def _embedded() -> Iterator[Stored]:
    for demo, directory in MODELS.items():
        path = Path(directory)
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        about = f"embedded: {command(_SERVED_BY[demo])}"
        yield Stored(EMBEDDED_MODEL_NAMES[demo], "", num_bytes, 0.0, about, path, is_embedded=True)


def _downloaded() -> Iterator[Stored]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    except (OSError, ValueError) as error:
        raise TokamakError(f"{constants.HF_HUB_CACHE} cannot be read: {error}; check HF_HOME") from error
    for repository in repositories:
        if repository.repo_type != "model":
            continue
        revisions = sorted(repository.revisions, key=lambda revision: revision.last_modified)
        yield Stored(
            repository.repo_id,
            "",
            repository.size_on_disk,
            repository.last_accessed,
            f"downloaded: {_about_files(revisions[-1].snapshot_path) if revisions else 'nothing complete'}",
            Path(repository.repo_path),
            tuple(revision.commit_hash for revision in revisions),
        )


def _from_modelscope() -> Iterator[Stored]:
    try:
        from engine.checkpoint.hubs.modelscope import downloaded
    except MissingExtraError:
        return
    for name, path, num_bytes in downloaded():
        snapshots = sorted(path.glob("snapshots/*"), key=lambda snapshot: snapshot.stat().st_mtime)
        yield Stored(
            name,
            "",
            num_bytes,
            path.stat().st_atime,
            f"downloaded from ModelScope: {_about_files(snapshots[-1])}",
            path,
            is_from_modelscope=True,
        )


def _about_files(snapshot: Path) -> str:
    """Return the architecture and precision of a downloaded checkpoint, or its GGUF files."""
    try:
        config: Any = msgspec.json.decode((snapshot / "config.json").read_bytes())
        stated = config.get("text_config") or config
        quantization = config.get("quantization_config", {}).get("quant_method")
        dtype = next((options[key] for options in (config, stated) for key in ("dtype", "torch_dtype") if key in options), None)
        return ", ".join(filter(None, (config.get("model_type"), dtype, quantization)))
    except (OSError, msgspec.DecodeError, AttributeError, TypeError):
        return ", ".join(sorted(file.name for file in snapshot.glob("*.gguf"))) or "no configuration"


def _packed(directory: Path) -> Iterator[Stored]:
    for path in sorted(directory.glob("*.weights")) if directory.is_dir() else ():
        label, _, id = path.stem.rpartition("-")
        try:
            status = path.stat()
            name, about = _about_packed(path)
        except FileNotFoundError:
            continue  # removed meanwhile by an engine that needed the space
        yield Stored(name or label, id, status.st_size, status.st_atime, f"packed: {about}", path)


def _about_packed(path: Path) -> tuple[str, str]:
    """Return the name of the model, if the file has it, and its other metadata."""
    from workers.weights.packed_file import DamagedFileError, PackedFile

    try:
        description = PackedFile(path, is_checked=False).description
    except (DamagedFileError, OSError) as error:
        return "", f"cannot be used: {error}"
    of, source = description["of"], description.get("source", {})
    precision = [of["dtype"], *(of[key] for key in ("quantization", "vision_quantization") if of[key] != "none")]
    values = ["random values"] if of["contents"].startswith("random ") else []
    about = ", ".join(filter(None, [source.get("architecture"), *precision, *values]))
    if not source:
        return "", about
    checkpoint = Path(source["path"])
    if (checkpoint / LINK_NAME).is_symlink():
        checkpoint = (checkpoint / LINK_NAME).readlink()
    place = f"{checkpoint}" if checkpoint.exists() else f"{checkpoint} (missing)"
    return _name_of(checkpoint), f"{about}, of {place}"


def _name_of(checkpoint: Path) -> str:
    """Return the model's name for `tokamak serve`: an embedded model, a repository of the hub, a directory or a GGUF file."""
    for demo, directory in MODELS.items():
        if checkpoint.match(str(Path(directory).relative_to(PACKAGES))):
            return EMBEDDED_MODEL_NAMES[demo]
    for parent in checkpoint.parents:
        is_from_modelscope = parent.parent.name == "models" and "--" in parent.name and checkpoint.parent.name == "snapshots"
        if parent.name.startswith("models--") or is_from_modelscope:
            return parent.name.removeprefix("models--").replace("--", "/")
    return stem_of(checkpoint.name)


def _remove(stored: Stored) -> int:
    if stored.revisions:
        from huggingface_hub import scan_cache_dir

        scan_cache_dir(stored.path.parent).delete_revisions(*stored.revisions).execute()
        is_gone = not any(stored.path.glob("snapshots/*"))
    elif stored.is_from_modelscope:
        from engine.checkpoint.hubs.modelscope import remove_downloaded

        remove_downloaded(stored.name, stored.path)
        is_gone = not stored.path.exists()
    else:
        from workers.weights.cache import WeightCache

        is_gone = WeightCache(stored.path.parent, limit=0).remove(stored.path.stem)
    name = f"{stored.name} {stored.id}".rstrip()
    if is_gone:
        print(f"removed {name}, {units.size(stored.num_bytes)}")
        return 0
    print(
        (f"tokamak models: error: {name} is in use or belongs to another user; stop the engines that use it first"),
        file=sys.stderr,
    )
    return 1
