"""Interface of hubs, as `locate.py` uses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

HubName = Literal["huggingface", "modelscope"]
HUBS: tuple[HubName, ...] = get_args(HubName)
OTHER_FORMATS = ("*/*", "consolidated*")  # the same weights for other engines: in subfolders, and as Mistral writes them


def one_line(error: BaseException) -> str:
    """Return the text of a client's error as one line."""
    return " ".join(str(error).split())


class Hub(Protocol):
    """A hub with repositories `owner/model`; an empty revision is the default branch. All raise CheckpointError with a remedy:
    no such repository, no access, no connection."""

    def snapshot(self, repository: str, revision: str, patterns: Sequence[str]) -> Path:
        """Download the files that match a pattern, without subfolders; return their directory."""
        ...

    def file_names(self, repository: str, revision: str) -> list[str]:
        """Return the names of all files; if the hub cannot be reached, of those that were downloaded."""
        ...

    def files(self, repository: str, revision: str, names: Sequence[str]) -> Path:
        """Download the files; return the first one's path."""
        ...
