"""A run: the private directory of one engine, its lock, its manifest and the files in it.

The supervisor creates a run and owns it; its children, `tokamak top` and `tokamak ctl` open it by its directory. A run is alive
as long as its owner holds the lock, so whoever can take the lock of a run with a dead owner may clear it away
(`engine/supervisor/reaper.py`).

    <root>/                     $XDG_RUNTIME_DIR/tokamak or /tmp/tokamak-<uid>, mode 0700
        .lock                   held while a start clears dead runs and makes its own directory
        <run id>/               or the directory given with --run-dir, to which <root>/<run id> is then a symbolic link
            lock                flock held by the supervisor; text: pid, start ticks, boot id
            manifest.json       configuration and actors
            weights.json        what the engine is to be, whichever actor dies: state, weights of each rank, numbers used
            control.ipc         supervisor's ROUTER: Command -> Reply
            events.ipc          supervisor's PULL: events of the actors
            kv-events.ipc       cache messenger's PUB
            <actor>.log         stderr of each child
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import StartError, TokamakError
from engine.messages import WeightsState
from engine.process.topology import ActorPlan
from shm.process import ProcessIdentity

MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path without its terminating zero
SOCKET_NAMES = ("control.ipc", "events.ipc", "kv-events.ipc")
MANIFEST_NAME, WEIGHTS_NAME, LOCK_NAME = "manifest.json", "weights.json", "lock"


class Manifest(msgspec.Struct, frozen=True):
    """What the supervisor wrote down about its run."""

    config: EngineConfig
    actors: tuple[ActorPlan, ...]
    pid: int  # of the supervisor
    started_at: float  # seconds since 1970


class WeightsRecord(msgspec.Struct, frozen=True):
    """What the engine is to be, whichever actor dies. The scheduler alone writes it, as a whole: before a version number is
    used, and when an order is done, before anybody hears of it. So it always says what was before an order or what is after it.
    """

    path: str  # of the weights in use; while cleared, of those to come back to
    version: int
    last_version: int  # the highest number that was ever taken in this run
    state: WeightsState  # NORMAL, PAUSED or CLEARED
    ranks: tuple[tuple[str, int], ...]  # path and version that each rank holds; while cleared, comes back to

    @staticmethod
    def of_start(config: EngineConfig) -> WeightsRecord:
        """Version 1 is what the engine was started with."""
        return WeightsRecord(config.model, 1, 1, WeightsState.NORMAL, ((config.model, 1),) * config.num_ranks)


@dataclass(frozen=True, slots=True)
class Run:
    """Paths and documents of one run. Opening one takes no lock and needs no living engine."""

    run_id: str
    directory: Path

    @property
    def lock_path(self) -> Path:
        return self.directory / LOCK_NAME

    @property
    def manifest_path(self) -> Path:
        return self.directory / MANIFEST_NAME

    @property
    def weights_path(self) -> Path:
        return self.directory / WEIGHTS_NAME

    @property
    def control_endpoint(self) -> str:
        return f"ipc://{self.directory / 'control.ipc'}"

    @property
    def events_endpoint(self) -> str:
        return f"ipc://{self.directory / 'events.ipc'}"

    @property
    def kv_events_endpoint(self) -> str:
        return f"ipc://{self.directory / 'kv-events.ipc'}"

    def log_path(self, actor: str) -> Path:
        return self.directory / f"{actor}.log"

    def manifest(self) -> Manifest:
        """The manifest. Raises TokamakError where it is missing or none of ours."""
        try:
            return msgspec.json.decode(self.manifest_path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise TokamakError(f"no readable manifest in {self.directory}: {error}; is it the directory of a run?") from error

    def files(self) -> list[Path]:
        """All that a run may consist of, in the order in which to remove it: the manifest, which names the logs, after them."""
        actors: tuple[ActorPlan, ...] = ()
        with contextlib.suppress(TokamakError):
            actors = self.manifest().actors
        documents = (self.weights_path, self.manifest_path)
        return [
            *(self.log_path(actor.name) for actor in actors),
            *(self.directory / name for name in SOCKET_NAMES),
            *map(_unfinished, documents),
            *documents,
            self.lock_path,
        ]

    def check_path(self) -> None:
        """StartError where a socket in the directory would have too long a path."""
        longest = max(len(os.fsencode(self.directory / name)) for name in SOCKET_NAMES)
        if longest > MAX_SOCKET_PATH_BYTES:
            raise StartError(
                f"the run directory {self.directory} makes socket paths of {longest} bytes, the limit is "
                f"{MAX_SOCKET_PATH_BYTES}; give a shorter one with --run-dir"
            )

    def write_manifest(self, manifest: Manifest) -> None:
        _write_atomically(self.manifest_path, msgspec.json.format(msgspec.json.encode(manifest), indent=2))

    def weights(self) -> WeightsRecord:
        """What was written last. TokamakError where it is missing: going on with the weights of the start would be a guess."""
        try:
            return msgspec.json.decode(self.weights_path.read_bytes(), type=WeightsRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise TokamakError(f"no readable {WEIGHTS_NAME} in {self.directory}: {error}; start the engine anew") from error

    def write_weights(self, record: WeightsRecord) -> None:
        """Whole or not at all, whenever this process dies. OSError where there is no room, or no such directory any more."""
        _write_atomically(self.weights_path, msgspec.json.encode(record))

    def owner(self) -> ProcessIdentity | None:
        """The process that made the run; None where the lock file is missing or was never filled."""
        try:
            fields = self.lock_path.read_text().split()
            return ProcessIdentity(int(fields[0]), int(fields[1]), fields[2])
        except (OSError, ValueError, IndexError):
            return None

    def is_alive(self) -> bool:
        """Whether the process that made the run lives. Looks at its identity, not at the lock: trying a lock takes it."""
        owner = self.owner()
        return owner is not None and owner.is_alive()


def open_run(directory: Path) -> Run:
    """The run in `directory`, by its manifest."""
    resolved = directory.resolve()
    run_id = Run("", resolved).manifest().config.run_id
    return Run(run_id, resolved)


def find_runs() -> list[Run]:
    """The runs of this user that have a manifest, living ones first, then the newest first."""
    found: list[tuple[bool, float, Run]] = []
    for entry in run_entries(runs_root()):
        run = Run(entry.name, entry.resolve())
        with contextlib.suppress(TokamakError):
            found.append((run.is_alive(), run.manifest().started_at, run))
    found.sort(key=lambda item: item[:2], reverse=True)
    return [run for _, _, run in found]


def choose_run(run_id: str = "", directory: Path | None = None) -> Run:
    """The run in `directory`, or the one whose id begins with `run_id`, or the first of `find_runs`. TokamakError: there is
    none."""
    if directory is not None:
        return open_run(directory)
    runs = [run for run in find_runs() if run.run_id.startswith(run_id)]
    if not runs:
        which = f"no run {run_id}" if run_id else "no engine, running or dead,"
        raise TokamakError(f"there is {which} of this user here; start one with `tokamak serve`, or name its --run-dir")
    return runs[0]


def run_entries(root: Path) -> list[Path]:
    """Directories and links under `root` that are named as a run id."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return [root / name for name in sorted(names) if is_run_id(name)]


def is_run_id(name: str) -> bool:
    return len(name) == 8 and all(letter in "0123456789abcdef" for letter in name)


def new_run_id() -> str:
    return os.urandom(4).hex()


def runs_root() -> Path:
    """Where this user's runs are. The one look at the environment outside the options: tools find a run before they know its
    configuration."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    is_ours = runtime.is_dir() and runtime.stat().st_uid == os.getuid()  # not so after sudo
    return runtime / "tokamak" if is_ours else Path(f"/tmp/tokamak-{os.getuid()}")


def make_private_directory(path: Path) -> None:
    """Make `path` (mode 0700) or check that what is there is a directory of ours that nobody else may enter."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat() if not path.is_symlink() else path.stat()
    except OSError as error:
        raise StartError(f"cannot make the run directory {path}: {error.strerror}; give another with --run-dir") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise StartError(
            f"{path} is owned by user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, expected a directory of user "
            f"{os.getuid()} with mode 700; remove it, chmod it, or give another with --run-dir"
        )


@contextlib.contextmanager
def root_lock(root: Path) -> Iterator[None]:
    """Only one start at a time clears away dead runs and makes its directory. Held for milliseconds."""
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock_run(run: Run) -> int:
    """Take the run's lock and write the owner into it; the lock ends with the returned descriptor, so with the process."""
    descriptor = os.open(run.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        owner = run.owner()
        raise StartError(
            f"{run.directory} is in use by another engine (process {owner.pid if owner else 'unknown'}); stop it or give "
            "another directory with --run-dir"
        ) from error
    identity = ProcessIdentity.of()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{identity.pid} {identity.start_ticks} {identity.boot_id}\n".encode(), 0)
    return descriptor


def _write_atomically(path: Path, data: bytes) -> None:
    _unfinished(path).write_bytes(data)
    os.replace(_unfinished(path), path)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
