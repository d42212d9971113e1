"""`tokamak key FILE`: makes the secret key of a cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.cluster.key import make_key_file
from engine.errors import OptionError, exit_code_of


def main(arguments: list[str]) -> int:
    """Write the key file; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="tokamak key",
        description="Make the secret key of a cluster. Copy the file to each machine, with mode 600, and pass it to "
        "`tokamak serve` and `tokamak router` as --cluster-key-file.",
    )
    parser.add_argument("FILE", type=Path, help="file to write; it must not exist")
    path = parser.parse_args(arguments).FILE
    try:
        make_key_file(path)
    except OptionError as error:
        print(f"tokamak key: error: {error}", file=sys.stderr)
        return exit_code_of(error)
    print(f"{path}: copy it to each machine of the cluster (mode 600)")
    return 0
