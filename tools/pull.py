"""`tokamak pull`: download a model from a hub, as `tokamak serve` would, and print its directory.

Called by tools/cli.py, in its own process. Exit codes: 0 done, 1 not done, 2 bad arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from engine.checkpoint.hubs.hub import HUBS
from engine.checkpoint.locate import resolve_model
from engine.installation import command
from engine.options.argument_parser import ArgumentParser
from engine.options.resolve_files import with_revision
from tools.exits import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="tokamak pull", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="owner/model, owner/model@revision, or owner/model:Q4_K_M for a GGUF file")
    hub = os.environ.get("TOKAMAK_HUB") or "huggingface"
    parser.add_argument("--hub", choices=HUBS, default=hub, help="default: %(default)s")
    parser.add_argument("--revision", default="", metavar="NAME", help="branch, tag or commit; default: the main branch")
    options = parser.parse_args(argv)
    if options.hub not in HUBS:  # argparse does not check a default
        parser.error(f"TOKAMAK_HUB={options.hub} is not supported; expected one of {', '.join(HUBS)}")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return exit_code("tokamak pull", lambda: _pull(options), "stopped; the next pull continues the download")


def _pull(options: argparse.Namespace) -> int:
    path = resolve_model(with_revision(options.name, options.revision), options.hub)
    print(path)
    others = "" if options.hub == "huggingface" else f" --hub {options.hub}"
    print(f"serve it with: {command('serve')} {options.name}{others}", file=sys.stderr)
    return 0
