"""The parts of uvicorn that `api/connection.py` extends. uvicorn does not document them, so an untested version is an error at
the start, not in some later request."""

from __future__ import annotations

import uvicorn

from engine.errors import StartError

MIN_VERSION, END_VERSION = (0, 30), (0, 55)  # the same as in `pyproject.toml`


def check_version(version: str) -> None:
    """Raise StartError for a version of uvicorn that was not tested."""
    major, minor, *_ = version.split(".")
    if not (major.isdecimal() and minor.isdecimal() and MIN_VERSION <= (int(major), int(minor)) < END_VERSION):
        raise unknown_version(version)


def unknown_version(version: str) -> StartError:
    least, end = (".".join(map(str, bound)) for bound in (MIN_VERSION, END_VERSION))
    return StartError(
        f"uvicorn {version} is installed, the server's connections are made for uvicorn >={least},<{end}; "
        f"install one of these: pip install 'uvicorn>={least},<{end}'"
    )


check_version(uvicorn.__version__)
try:
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE as STATUS_LINE
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpToolsProtocol
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as RequestResponseCycle
except ImportError as error:
    raise unknown_version(uvicorn.__version__) from error
