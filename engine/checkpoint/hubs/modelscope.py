"""ModelScope. Endpoint, cache directory and token are those of modelscope_hub (`MODELSCOPE_ENDPOINT`, `MODELSCOPE_CACHE`,
`MODELSCOPE_API_TOKEN`); it is installed with the extra `modelscope`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.checkpoint.hubs.hub import OTHER_FORMATS, one_line
from engine.errors import CheckpointError, MissingExtraError
from engine.installation import DISTRIBUTION

try:
    from modelscope_hub import HubApi, ProgressCallback, errors
    from modelscope_hub.config import HubConfig
except ImportError as error:
    raise MissingExtraError(
        f"--hub modelscope needs modelscope-hub, not installed here; run pip install '{DISTRIBUTION}[modelscope]'", "modelscope"
    ) from error


class _SizeLimit(ProgressCallback):
    """Ends the download of a file that is larger than the hub's list says. The client itself takes any number of bytes for a
    file without a size."""

    def __init__(self, name: str, num_announced: int) -> None:
        super().__init__(name, num_announced)
        self._num_bytes = 0

    def update(self, size: int) -> None:
        self._num_bytes += size
        if self._num_bytes > self.file_size:
            raise errors.FileSizeMismatchError(
                f"{self.filename} is larger than the {self.file_size} bytes that the hub announced"
            )


class ModelScope:
    """The hub as the environment says."""

    def __init__(self) -> None:
        self._api = HubApi(HubConfig())  # not the client's own, which keeps the environment of its first use

    def snapshot(self, repository: str, revision: str, patterns: Sequence[str]) -> Path:
        return self._download(repository, revision, list(patterns), list(OTHER_FORMATS))

    def file_names(self, repository: str, revision: str) -> list[str]:
        with self._explained(repository, revision):
            try:
                found = self._api.list_repo_files(repository, "model", revision=revision or None)
            except errors.NetworkError:
                cached = self._cached(repository, revision)
                return [str(file.relative_to(cached)) for file in cached.rglob("*") if file.is_file()]
        return [file.path for file in found]

    def files(self, repository: str, revision: str, names: Sequence[str]) -> Path:
        return self._download(repository, revision, list(names), None) / names[0]

    def _download(self, repository: str, revision: str, patterns: list[str], ignored: list[str] | None) -> Path:
        with self._explained(repository, revision):
            try:
                found = self._api.download_repo(
                    repository,
                    "model",
                    revision=revision or None,
                    allow_patterns=patterns,
                    ignore_patterns=ignored,
                    progress_callbacks=[_SizeLimit],
                )
            except errors.NetworkError:
                found = self._cached(repository, revision)
        return Path(found).resolve()

    def _cached(self, repository: str, revision: str) -> Path:
        return Path(self._api.download_repo(repository, "model", revision=revision or None, local_files_only=True))

    @contextlib.contextmanager
    def _explained(self, repository: str, revision: str) -> Iterator[None]:
        """Convert the hub's errors to ours."""
        at = f" at revision {revision!r}" if revision else ""
        try:
            yield
        except errors.NotExistError as error:
            raise CheckpointError(
                f"{repository}: neither a directory nor a repository{at} on ModelScope (if it is private, set "
                "MODELSCOPE_API_TOKEN)"
            ) from error
        except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
            raise CheckpointError(f"{repository} on ModelScope needs a token with access: set MODELSCOPE_API_TOKEN") from error
        except (errors.CacheError, errors.NetworkError) as error:
            raise CheckpointError(
                f"{repository}: ModelScope cannot be reached and no complete snapshot is cached; check the connection or use a "
                "local directory"
            ) from error
        except (LookupError, TypeError, AttributeError, RecursionError) as error:  # the client checks no answer
            raise CheckpointError(
                f"{repository} cannot be downloaded: the server does not answer as ModelScope does ({type(error).__name__}: "
                f"{one_line(error)}); check MODELSCOPE_ENDPOINT"
            ) from error
        except Exception as error:
            raise CheckpointError(f"{repository} cannot be downloaded from ModelScope: {one_line(error)}") from error


def downloaded() -> Iterator[tuple[str, Path, int]]:
    """Yield the downloaded models: name, directory, bytes."""
    for found in HubApi().scan_cache(HubConfig().cache_dir).repos:
        path = Path(found.local_path or "")
        if found.repo_type == "model" and any(path.glob("snapshots/*")):
            yield found.repo_id, path, found.size_on_disk


def remove_downloaded(name: str, path: Path) -> None:
    """Remove the downloaded model `name`, which is in `path`."""
    HubApi().clear_cache(cache_dir=path.parent.parent, repo_type="model", repo_id=name)
