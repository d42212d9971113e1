"""A run: the private directory of one engine, its lock, its manifest and the files in it.

The supervisor creates a run and owns it; its children, `tokamak top` and `tokamak ctl` open it by its directory. A run is alive
as long as its owner holds the lock, so a process that gets the lock of a run with a dead owner may remove it
(`engine/supervisor/reaper.py`).

    <root>/                     $XDG_RUNTIME_DIR/tokamak or /tmp/tokamak-<uid>, mode 0700
        .lock                   held while a start removes dead runs and creates its own directory
        <run id>/               or the directory given with --run-dir, to which <root>/<run id> is then a symbolic link
            lock                flock held by the supervisor; text: pid, start ticks, boot id
            manifest.json       configuration and actors
            model.msgpack       metadata of the checkpoint, read at the start (`engine/checkpoint/record.py`)
            weights.json        what survives every actor: state, weights of each rank, version numbers;
                                with several replicas, weights.<k>.json
            adapters.json       the LoRA adapters in service, if adapters are enabled
            engines.json        the engines of a router, with their places in its tables
            order.json          the order that they carry out just now
            control.ipc         supervisor's ROUTER: Command -> Reply
            kv-events.ipc       cache actor's PUB; with several replicas, kv-events.<k>.ipc
            api.sock                HTTP, with `--uds auto`
            responses/          responses of /v1/responses, a limited number
            <actor>.log         stderr of each child
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import OptionError, StartError, TokamakError
from engine.messages import AdaptersRecord, EngineRecord
from engine.messages import WeightsRecord as WeightsRecord
from engine.process.topology import CACHE, SCHEDULER, ActorPlan, actors_of, role_of
from shm.process import ProcessIdentity

MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path without its terminating zero
_MAX_PID = 1 << 30
CONTROL_NAME = "control.ipc"
API_NAME = "api.sock"
KV_EVENTS_NAME = "kv-events.ipc"
MAX_DOCUMENT_BYTES = 16 << 20  # a manifest holds a chat template
MANIFEST_NAME, MODEL_NAME, WEIGHTS_NAME, LOCK_NAME = "manifest.json", "model.msgpack", "weights.json", "lock"


class _ManifestActors(msgspec.Struct):
    """Part of a manifest that all versions can read."""

    actors: tuple[ActorPlan, ...]


class Manifest(msgspec.Struct, frozen=True):
    """Record of a run, written by its supervisor."""

    config: EngineConfig
    actors: tuple[ActorPlan, ...]
    pid: int  # of the supervisor
    started_at: float  # seconds since 1970


class Run(msgspec.Struct, frozen=True):
    """Paths and documents of one run. Opening it takes no lock, and the engine need not run."""

    run_id: str
    directory: Path

    @property
    def lock_path(self) -> Path:
        return self.directory / LOCK_NAME

    @property
    def manifest_path(self) -> Path:
        return self.directory / MANIFEST_NAME

    @property
    def model_path(self) -> Path:
        return self.directory / MODEL_NAME

    @property
    def vocabulary_path(self) -> Path:
        """The tokens as bytes, written when they are first needed outside the tokenizers (`engine/grammars`)."""
        return self.directory / "vocabulary"

    def weights_path(self, scheduler: str = SCHEDULER) -> Path:
        """Return the path of the record of a scheduler's replica."""
        return self.directory / with_replica(WEIGHTS_NAME, scheduler)

    @property
    def adapters_path(self) -> Path:
        return self.directory / "adapters.json"

    @property
    def engines_path(self) -> Path:
        return self.directory / "engines.json"

    @property
    def order_path(self) -> Path:
        """The order that a router's engines carry out just now (`engine/cluster/router_orders.py`)."""
        return self.directory / "order.json"

    @property
    def control_endpoint(self) -> str:
        return f"ipc://{self.directory / CONTROL_NAME}"

    def kv_events_endpoint(self, cache: str = CACHE) -> str:
        return f"ipc://{self.directory / with_replica(KV_EVENTS_NAME, cache)}"

    def log_path(self, actor: str) -> Path:
        return self.directory / f"{actor}.log"

    def manifest(self) -> Manifest:
        """Read the manifest. Raises TokamakError if it is missing or not ours."""
        try:
            return msgspec.json.decode(read_document(self.manifest_path), type=Manifest)
        except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
            raise TokamakError(
                f"cannot read the manifest in {self.directory}: {error}; check that it is a run directory"
            ) from error

    @property
    def packed_path(self) -> Path:
        """Directory of packed weights that several ranks share and that is removed with the run."""
        return self.directory / "packed"

    @property
    def responses_path(self) -> Path:
        """The directory of stored responses, created with the first one (`api/responses/store.py`)."""
        return self.directory / "responses"

    @property
    def files_path(self) -> Path:
        """The directory of clients' files and batches, created with the first one (`api/files/store.py`)."""
        return self.directory / "files"

    def files(self) -> list[Path]:
        """Return all possible files of a run, in the order in which to remove them: the manifest, which names the logs, after
        them."""
        actors: tuple[ActorPlan, ...] = ()
        # another version has other options, but its actors are readable
        with contextlib.suppress(OSError, msgspec.DecodeError):
            actors = msgspec.json.decode(read_document(self.manifest_path), type=_ManifestActors).actors
        names = [actor.name for actor in actors if "/" not in actor.name]
        of_router = (self.engines_path, self.order_path)
        documents = (self.model_path, self.vocabulary_path, self.adapters_path, *of_router, self.manifest_path)
        records = f"{self.weights_path().stem}*.json"  # of each replica, or place of a router
        return [
            *map(self.log_path, names),
            self.directory / CONTROL_NAME,
            self.directory / API_NAME,
            *self.packed_path.glob("*"),
            *self.responses_path.glob("*"),
            *self.files_path.glob("*"),
            *(self.directory / with_replica(KV_EVENTS_NAME, cache) for cache in actors_of(CACHE, names) or (CACHE,)),
            *map(_unfinished, documents),
            *self.directory.glob(f".{records}.new"),
            *self.directory.glob(records),
            *self.directory.glob(f".{self.vocabulary_path.name}.*"),  # temporary files of concurrent writers
            *documents,
            self.lock_path,
        ]

    def check_path(self) -> None:
        """Raise OptionError if a socket in the directory would have too long a path."""
        longest = len(os.fsencode(self.directory / with_replica(KV_EVENTS_NAME, f"{CACHE}00")))
        if longest > MAX_SOCKET_PATH_BYTES:
            raise OptionError(
                f"socket paths in the run directory {self.directory} would have {longest} bytes, the limit is "
                f"{MAX_SOCKET_PATH_BYTES}; use a shorter --run-dir"
            )

    def write_manifest(self, manifest: Manifest) -> None:
        _write_atomically(self.manifest_path, msgspec.json.format(msgspec.json.encode(manifest), indent=2))

    def write(self, path: Path, data: bytes) -> None:
        """Write one of the run's documents atomically."""
        _write_atomically(path, data)

    def is_linked(self) -> bool:
        """Whether the run is linked under the root of this user's runs."""
        return os.path.lexists(runs_root() / self.run_id)

    def weights(self, scheduler: str = SCHEDULER) -> WeightsRecord:
        """Read the record that was written last. Raises TokamakError if it is missing: the weights in use are then unknown."""
        path = self.weights_path(scheduler)
        try:
            return msgspec.json.decode(read_document(path), type=WeightsRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise TokamakError(f"cannot read {path.name} in {self.directory}: {error}; restart the engine") from error

    def write_weights(self, record: WeightsRecord, scheduler: str = SCHEDULER) -> None:
        """Write the record atomically. Raises OSError if there is no space, or the directory is gone."""
        _write_atomically(self.weights_path(scheduler), msgspec.json.encode(record))

    def adapters(self) -> AdaptersRecord:
        """Read the adapters that were written last. Raises TokamakError if they cannot be read."""
        try:
            return msgspec.json.decode(read_document(self.adapters_path), type=AdaptersRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise TokamakError(f"cannot read {self.adapters_path.name} in {self.directory}: {error}") from error

    def write_adapters(self, record: AdaptersRecord) -> None:
        """Write the adapters atomically. Raises OSError."""
        _write_atomically(self.adapters_path, msgspec.json.encode(record))

    def engines(self) -> list[EngineRecord]:
        """Read the engines of a router as its link wrote them last; none if it has not, or the directory is gone."""
        try:
            return msgspec.json.decode(read_document(self.engines_path), type=list[EngineRecord])
        except (OSError, msgspec.DecodeError):
            return []

    def write_engines(self, engines: list[EngineRecord]) -> None:
        """Write the engines atomically. Raises OSError."""
        _write_atomically(self.engines_path, msgspec.json.encode(engines))

    def owner(self) -> ProcessIdentity | None:
        """Return the process that created the run; None if the lock file is missing or empty."""
        try:
            pid, start_ticks, boot_id = read_document(self.lock_path).decode().split()
            return ProcessIdentity(int(pid), int(start_ticks), boot_id) if 0 < int(pid) <= _MAX_PID else None
        except (OSError, ValueError):
            return None

    def is_alive(self) -> bool:
        """Whether the process that created the run lives. Checks its identity, not the lock: trying a lock takes it."""
        owner = self.owner()
        return owner is not None and owner.is_alive()


def with_replica(file_name: str, actor: str) -> str:
    """Return the file name for a replica: `kv-events.ipc` for the actor `cache`, `kv-events.1.ipc` for `cache1`."""
    stem, dot, suffix = file_name.rpartition(".")
    index = actor[len(role_of(actor)) :]
    return f"{stem}.{index}{dot}{suffix}" if index else file_name


def open_run(directory: Path) -> Run:
    """Return the run in `directory`, according to its manifest."""
    resolved = Path(os.path.realpath(directory))  # does not fail on loops, as `resolve` does
    run_id = Run("", resolved).manifest().config.run_id
    return Run(run_id, resolved)


def find_runs() -> list[Run]:
    """Return the runs of this user that have a manifest: living ones first, then the newest first."""
    found: list[tuple[bool, float, Run]] = []
    root = runs_root()
    for entry in run_entries(root) if is_private(root) else []:
        with contextlib.suppress(OSError, TokamakError):  # skip whatever is not a run
            run = Run(entry.name, resolve_entry(entry))
            found.append((run.is_alive(), run.manifest().started_at, run))
    found.sort(key=lambda item: item[:2], reverse=True)
    return [run for _, _, run in found]


def choose_run(run_id: str = "", directory: Path | None = None) -> Run:
    """Return the run in `directory`, or the one with an id that begins with `run_id`: a running engine, else the newest dead
    one. Raises TokamakError if there is none, or if several are running."""
    if directory is not None:
        return open_run(directory)
    runs = [run for run in find_runs() if run.run_id.startswith(run_id)]
    if not runs:
        which = f"no run {run_id}" if run_id else "no engine"
        raise TokamakError(f"{which} of this user found; start one with `tokamak serve`, or pass its --run-dir")
    living = [run for run in runs if run.is_alive()]
    if len(living) > 1:
        which = f"with a run id that starts with {run_id} " if run_id else ""
        lines = "\n".join(f"  --run {run.run_id}  {_described(run)}" for run in living)
        raise TokamakError(f"{len(living)} engines {which}are running; choose one with --run or --run-dir:\n{lines}")
    return runs[0]


def _described(run: Run) -> str:
    """Return model, address and directory of a run, for a choice between runs."""
    with contextlib.suppress(TokamakError):
        config = run.manifest().config
        return f"{config.served_model_name[0]}  {config.url}  {run.directory}"
    return str(run.directory)  # it has just ended


def run_entries(root: Path) -> list[Path]:
    """Return the paths under `root` that are named like a run id."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    return [root / name for name in sorted(names) if is_run_id(name)]


def resolve_entry(entry: Path) -> Path:
    """Return the directory that an entry is or links to. Raises OSError if there is none, or if other users have access."""
    directory = Path(os.path.realpath(entry, strict=True))
    if not is_private(directory):
        raise PermissionError(errno.EPERM, f"not a private directory of user {os.getuid()}", str(directory))
    return directory


def is_private(path: Path) -> bool:
    """Return whether `path` is, or links to, a directory of this user that no other user may enter."""
    try:
        return _is_private(path.stat())
    except OSError:
        return False


def _is_private(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def read_document(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError for anything else (opening a FIFO would block) and for a file that
    is too large to be ours."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_DOCUMENT_BYTES:
            raise OSError(errno.EINVAL, f"not a regular file of at most {MAX_DOCUMENT_BYTES} bytes", str(path))
        return file.read(MAX_DOCUMENT_BYTES)


def is_run_id(name: str) -> bool:
    return len(name) == 8 and all(letter in "0123456789abcdef" for letter in name)


def new_run_id() -> str:
    return os.urandom(4).hex()


def runs_root() -> Path:
    """Return the directory of this user's runs. The only use of the environment outside the options: tools find a run before
    they know its configuration."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    is_ours = runtime.is_dir() and runtime.stat().st_uid == os.getuid()  # not after sudo
    return runtime / "tokamak" if is_ours else Path(f"/tmp/tokamak-{os.getuid()}")


def make_private_directory(path: Path) -> None:
    """Create `path` (mode 0700), or check that it is our directory and that no other user may enter."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat() if not path.is_symlink() else path.stat()
    except OSError as error:
        raise StartError(f"cannot make the run directory {path}: {error.strerror}; use another --run-dir") from error
    if not _is_private(status):
        raise StartError(
            f"{path} is owned by user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, expected a directory of "
            f"user {os.getuid()} with mode 700; remove it, chmod it, or use another --run-dir"
        )


def link_run(run: Run) -> None:
    """Link a run in another directory under the root of this user's runs."""
    entry = runs_root() / run.run_id
    if not os.path.lexists(entry):
        entry.symlink_to(run.directory)


@contextlib.contextmanager
def root_lock(root: Path) -> Iterator[None]:
    """Hold the lock under which a start removes dead runs and creates its directory, for milliseconds."""
    path = root / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"cannot open {path}: {error.strerror}; remove it") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock_run(run: Run) -> int:
    """Lock the run and write the owner into its lock file; the lock is held until the returned descriptor is closed, or the
    process ends."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(run.lock_path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            identity = ProcessIdentity.of()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{identity.pid} {identity.start_ticks} {identity.boot_id}\n".encode(), 0)
        except OSError:
            os.close(descriptor)
            raise
    except BlockingIOError as error:
        owner = run.owner()
        raise StartError(
            f"{run.directory} is in use by another engine (process {owner.pid if owner else 'unknown'}); stop it, or use "
            "another --run-dir"
        ) from error
    except OSError as error:
        raise StartError(f"cannot lock {run.lock_path}: {error.strerror}; remove it, or use another --run-dir") from error
    return descriptor


def _write_atomically(path: Path, data: bytes) -> None:
    _unfinished(path).write_bytes(data)
    os.replace(_unfinished(path), path)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")
