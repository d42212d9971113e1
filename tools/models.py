"""`tokamak models`: what was downloaded from the hub and what was packed of it, on this machine; and its removal.

Called by tools/cli.py, in its own process. The hub's cache is huggingface_hub's, shared with other programs; packed weights are
the engines', and one that is in use is not removed. Exit codes: 0 done, 1 not done, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.checkpoint.files import user_cache
from engine.options.argument_parser import ArgumentParser
from tools import units


class Stored(msgspec.Struct, frozen=True):
    """Something that takes room: `name` as `rm` takes it."""

    kind: str  # "hub" | "packed"
    name: str
    num_bytes: int
    used_s: float  # seconds since the epoch
    path: Path
    revisions: tuple[str, ...] = ()  # of the hub


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    found = [*_downloaded(), *_packed(options.weight_cache_dir)]
    if options.command != "rm":
        print("\n".join(_lines(found)))
        return 0
    missing = [name for name in options.names if not any(stored.name == name for stored in found)]
    if missing:
        print(f"tokamak models: error: there is no {', '.join(missing)}; `tokamak models` lists what there is", file=sys.stderr)
        return 1
    return max(_remove(stored) for stored in found if stored.name in options.names)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="tokamak models", description=(__doc__ or "").partition("\n")[0])
    cache = os.environ.get("TOKAMAK_WEIGHT_CACHE_DIR") or user_cache() / "weights"
    parser.add_argument("--weight-cache-dir", type=Path, default=Path(cache), metavar="DIR", help="default: %(default)s")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="show what there is (so does no command)")
    remove = commands.add_parser("rm", help="remove some of it")
    remove.add_argument("names", nargs="+", metavar="NAME", help="as listed")
    return parser


def _lines(found: Sequence[Stored]) -> list[str]:
    if not found:
        return ["nothing was downloaded or packed"]
    width = max(len(stored.name) for stored in found)
    lines = [f"{'':6}  {'name':<{width}}  {'size':>6}  last used"]
    for stored in sorted(found, key=lambda one: (one.kind, one.name)):
        age = units.seconds(max(0.0, time.time() - stored.used_s))
        lines.append(f"{stored.kind:<6}  {stored.name:<{width}}  {units.size(stored.num_bytes):>6}  {age} ago")
    return [*lines, f"{'':6}  {'':<{width}}  {units.size(sum(stored.num_bytes for stored in found)):>6}"]


def _downloaded() -> list[Stored]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        Stored(
            "hub",
            repository.repo_id,
            repository.size_on_disk,
            repository.last_accessed,
            Path(repository.repo_path),
            tuple(revision.commit_hash for revision in repository.revisions),
        )
        for repository in repositories
        if repository.repo_type == "model"
    ]


def _packed(directory: Path) -> list[Stored]:
    paths = sorted(directory.glob("*.weights")) if directory.is_dir() else []
    return [Stored("packed", path.stem, path.stat().st_size, path.stat().st_mtime, path) for path in paths]


def _remove(stored: Stored) -> int:
    if stored.kind == "hub":
        from huggingface_hub import scan_cache_dir

        scan_cache_dir().delete_revisions(*stored.revisions).execute()
        is_gone = not any(stored.path.glob("snapshots/*"))
    else:
        from workers.weights.cache import WeightCache

        is_gone = WeightCache(stored.path.parent, limit=0).remove(stored.name)
    if is_gone:
        print(f"removed {stored.name}, {units.size(stored.num_bytes)}")
        return 0
    print(f"tokamak models: error: {stored.name} is in use, or not this user's; stop its engines first", file=sys.stderr)
    return 1
