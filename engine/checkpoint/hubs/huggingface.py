"""The Hugging Face hub. Endpoint (of a mirror), cache directory, token and offline switch are huggingface_hub's own
(`HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download, set_client_factory, snapshot_download
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._http import default_client_factory

from engine.checkpoint.files import leads_outside
from engine.checkpoint.hubs.hub import OTHER_FORMATS, one_line
from engine.errors import CheckpointError

_TIMEOUT_S = 60.0  # of a connection and between two parts of an answer, where the client sets none
_MAX_ANSWER_BYTES = 128 << 20  # of everything but files, such as the list of a repository
_NAMING_HEADERS = ("etag", "x-linked-etag", "x-repo-commit")  # their values become names of files in the cache


def _limit_wait(request: httpx2.Request) -> None:
    given = request.extensions.get("timeout") or {}
    request.extensions["timeout"] = {name: given.get(name) or _TIMEOUT_S for name in ("connect", "read", "write", "pool")}


def _check_names(response: httpx2.Response) -> None:
    """Raise ValueError for a name that the client uses as a file's and that leads out of its cache."""
    names = {header: response.headers.get(header, "").removeprefix("W/").strip('"') for header in _NAMING_HEADERS}
    if response.is_success and "/api/" in response.url.path and "json" in response.headers.get("content-type", ""):
        response.read()
        answer = response.json()
        names["sha"] = answer.get("sha") or "" if isinstance(answer, dict) else ""
    for what, name in names.items():
        if not isinstance(name, str) or leads_outside(name):
            raise ValueError(f"{response.url.host} answered with {what} {name!r}, which leads out of the cache")


_announced: dict[str, int] = {}  # sizes of files, by URL


def _limit_size(response: httpx2.Response) -> None:
    """Note the size of a file that a HEAD announces, and end a download that exceeds it, or any other long answer. A mirror may
    redirect without a size; the file's own answer then has it."""
    place, request = str(response.url), response.request
    target = str(response.url.join(response.headers["location"])) if "location" in response.headers else place
    if request.method == "HEAD":
        own = "" if response.is_redirect else response.headers.get("content-length")
        size = response.headers.get("x-linked-size") or own or ""
        if size.isdecimal():
            _announced[target] = int(size)
    elif place in _announced and target != place:
        _announced[target] = _announced[place]
    elif response.is_success and isinstance(response.stream, httpx2.SyncByteStream):
        limit, which = _MAX_ANSWER_BYTES, "that are the limit of an answer"
        if place in _announced:
            limit, which = _announced[place], "that it announced"
        elif "content-length" in response.headers and "/api/" not in response.url.path:
            return  # HTTP ends it there
        response.stream = _LimitedStream(
            response.stream, limit, f"{response.url.host} sends more than the {limit} bytes {which}"
        )


class _LimitedStream(httpx2.SyncByteStream):
    """Body of a response, up to a limit."""

    def __init__(self, stream: httpx2.SyncByteStream, limit: int, trouble: str) -> None:
        self._stream, self._limit, self._trouble = stream, limit, trouble

    def __iter__(self) -> Iterator[bytes]:
        num_bytes = 0
        for part in self._stream:
            num_bytes += len(part)
            if num_bytes > self._limit:
                raise ValueError(self._trouble)
            yield part

    def close(self) -> None:
        self._stream.close()


def _make_client() -> httpx2.Client:
    client = default_client_factory()
    hooks = client.event_hooks
    on_response = [*hooks["response"], _limit_size, _check_names]
    client.event_hooks = {"request": [*hooks["request"], _limit_wait], "response": on_response}
    return client


set_client_factory(_make_client)


class HuggingFace:
    """The hub at `endpoint`; None: as the environment says."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    def snapshot(self, repository: str, revision: str, patterns: Sequence[str]) -> Path:
        with self._explained(repository, revision):
            found = snapshot_download(
                repository,
                revision=revision or None,
                endpoint=self._endpoint,
                allow_patterns=list(patterns),
                ignore_patterns=list(OTHER_FORMATS),
            )
        return Path(found).resolve()

    def file_names(self, repository: str, revision: str) -> list[str]:
        with self._explained(repository, revision):
            try:
                return HfApi(endpoint=self._endpoint).list_repo_files(repository, revision=revision or None)
            except (httpx2.TransportError, ConnectionError):
                cached = Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
                return [str(file.relative_to(cached)) for file in cached.rglob("*") if file.is_file()]

    def files(self, repository: str, revision: str, names: Sequence[str]) -> Path:
        with self._explained(repository, revision):
            paths = [hf_hub_download(repository, name, revision=revision or None, endpoint=self._endpoint) for name in names]
        return Path(paths[0])

    @contextlib.contextmanager
    def _explained(self, repository: str, revision: str) -> Iterator[None]:
        """Convert the hub's errors to ours."""
        place = self._endpoint or constants.ENDPOINT
        try:
            yield
        except GatedRepoError as error:
            raise CheckpointError(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN") from error
        except RepositoryNotFoundError as error:
            raise CheckpointError(
                f"{repository}: neither a directory nor a repository on the hub (if it is private, set HF_TOKEN)"
            ) from error
        except RevisionNotFoundError as error:
            raise CheckpointError(f"{repository} has no revision {revision!r} on the hub") from error
        except LocalEntryNotFoundError as error:
            if isinstance(error.__cause__, HfHubHTTPError | FileMetadataError):  # it was reached
                raise CheckpointError(f"{repository} cannot be downloaded: {one_line(error.__cause__)}") from error
            raise CheckpointError(
                f"{repository}: the hub at {place} cannot be reached and no complete snapshot is cached; check the connection, "
                "choose a mirror with HF_ENDPOINT, or use a local directory"
            ) from error
        except (LookupError, TypeError, AttributeError, RecursionError) as error:  # the client checks no answer
            raise CheckpointError(
                f"{repository} cannot be downloaded: {place} does not answer as the Hugging Face hub does "
                f"({type(error).__name__}: {one_line(error)}); check HF_ENDPOINT"
            ) from error
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise CheckpointError(
                f"{repository} cannot be downloaded: the hub's address is {place} ({one_line(error)}); check HF_ENDPOINT"
            ) from error
        except Exception as error:  # of HTTP, of files, of Xet: they have no common base
            raise CheckpointError(f"{repository} cannot be downloaded: {one_line(error)}") from error
