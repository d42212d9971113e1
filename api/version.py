"""Which release this is."""

from __future__ import annotations


def package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 8 ms of a start, for those who ask

    try:
        return version("tokamak")
    except PackageNotFoundError:
        return "0+uninstalled"  # run from a source tree
