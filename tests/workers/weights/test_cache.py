"""The weight cache: the second load maps the file that the first one packed if the checkpoint still has the same contents; the
model is served whatever is wrong with a file or its directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.checkpoint.files import map_file
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError
from engine.messages import SamplingParams
from ops import _cpu
from ops.cpu.packing import PackedWeight
from ops.cpu.table import TABLE
from tests.workers.checkpoints import TINY, drawn_tensors, to_paddle_layout, write_checkpoint, write_config, write_safetensors
from tests.workers.serving import ServedSequence, Serving, make_runner
from workers.engine.runner import ModelRunner
from workers.models.loading import LoadedModel, load_model
from workers.rank_group.share import TensorShare
from workers.weights.cache import WeightCache
from workers.weights.checksums import Checksums
from workers.weights.loader import LoadOptions
from workers.weights.packed_file import Layout
from workers.weights.packing import Progress
from workers.weights.precision import Precision

LIMIT = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", TINY)
    return tmp_path / "model"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights"


def load(path: Path, directory: Path | None, *, limit: int = LIMIT, precision: Precision = Precision()) -> LoadedModel:  # noqa: B008
    cache = WeightCache(directory, limit) if directory else None
    return load_model(
        path, ModelConfig.read(path), TABLE, 16, lambda done, total: None, LoadOptions(precision=precision, cache=cache)
    )


def weights_of(loaded: LoadedModel) -> list[bytes]:
    layers: Any = loaded.model.layers
    modules = [module for layer in layers for module in (layer.qkv, layer.mlp.gate_up, layer.mlp.down, layer.input_norm)]
    return [_bytes(module.weight) for module in (*modules, loaded.model.embedding, loaded.model.head)]


def _bytes(weight: Any) -> bytes:
    parts = (weight.values, weight.scales, weight.offsets) if isinstance(weight, PackedWeight) else (weight,)
    return b"".join(part.owner.tobytes() for part in parts if part is not None)


def resident_bytes(path: Path) -> int:
    """Return the resident bytes of this process's mappings of files below `path`."""
    found, is_within = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            is_within = str(path) in line
        elif is_within and name == "Rss:":
            found += int(line.split()[1]) << 10
    return found


def files(directory: Path) -> list[str]:
    """Return the files of packed weights, complete or partial. Checksums appear if the test is so slow that its checkpoint has
    settled."""
    found = directory.iterdir() if directory.exists() else []
    return sorted(path.name for path in found if not path.name.startswith("checksums."))


def packed_files(directory: Path) -> list[Path]:
    return [directory / name for name in files(directory)]


def writing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("packed-weights")]


def overwrite_values(path: Path) -> None:
    """Write other numbers to a file that otherwise looks the same: name, inode, size, time and header."""
    before = path.stat()
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:begin] + b"\x3f" * (len(content) - begin))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


class TestHit:
    def test_second_load_packs_nothing(self, model: Path, directory: Path) -> None:
        first, second = load(model, directory), load(model, directory)
        assert (first.cache, second.cache) == ("miss", "hit")
        assert weights_of(first) == weights_of(second) == weights_of(load(model, None))
        assert first.num_bytes == second.num_bytes > 0

    def test_each_memory_node_has_its_own_file(self, model: Path, directory: Path) -> None:
        cache, config = WeightCache(directory, LIMIT), ModelConfig.read(model)
        found = [
            load_model(model, config, TABLE, 16, lambda done, total: None, LoadOptions(cache=cache, node=node))
            for node in (0, 1, 1, 0)
        ]
        assert [loaded.cache for loaded in found] == ["miss", "miss", "hit", "hit"]
        assert len(packed_files(directory)) == 2
        assert all(weights_of(loaded) == weights_of(found[0]) for loaded in found)

    def test_pooling_has_its_own_packed_file(self, tmp_path: Path, directory: Path) -> None:
        """A head that is the embedding as well is packed for answers, and not for vectors."""
        path = tmp_path / "tied"
        config = write_checkpoint(path, {**TINY, "tie_word_embeddings": True})

        def outcome(config: ModelConfig) -> str:
            cache = WeightCache(directory, LIMIT)
            return load_model(path, config, TABLE, 16, lambda done, total: None, LoadOptions(cache=cache)).cache

        of_vectors = msgspec.structs.replace(config, task="embed")
        found = [outcome(each) for each in (config, of_vectors, config, of_vectors)]
        assert found == ["miss", "miss", "hit", "hit"]

    def test_cached_load_reports_full_progress(self, model: Path, directory: Path) -> None:
        cache, config = WeightCache(directory, LIMIT), ModelConfig.read(model)
        seen: list[list[tuple[int, int]]] = [[], []]
        for shown in seen:
            load_model(
                model, config, TABLE, 16, lambda done, total, shown=shown: shown.append((done, total)), LoadOptions(cache=cache)
            )  # type: ignore[misc]
        for shown in seen:
            assert shown == sorted(shown)
            assert shown[-1][0] == shown[-1][1] > 0

    def test_weights_are_mapped_read_only(self, model: Path, directory: Path) -> None:
        loaded = load(model, directory)
        weight: Any = loaded.model.head.weight
        assert not weight.values.owner.flags.writeable
        assert str(directory) in Path("/proc/self/maps").read_text()

    def test_pages_of_the_checkpoint_are_released(self, model: Path, directory: Path) -> None:
        loaded = load(model, directory)
        assert loaded.cache == "miss"
        assert resident_bytes(model) == 0
        assert resident_bytes(directory) > 0


class TestKey:
    def test_changed_values_miss_the_cache(self, model: Path, directory: Path) -> None:
        first = load(model, directory)
        overwrite_values(model / "model.safetensors")
        second = load(model, directory)
        assert second.cache == "miss"
        assert weights_of(first) != weights_of(second) == weights_of(load(model, None))
        assert len(files(directory)) == 2

    def test_equal_contents_share_a_file(self, model: Path, directory: Path) -> None:
        """The age and place of the files do not matter, nor what config.json says about the computation."""
        load(model, directory)
        os.utime(model / "model.safetensors", ns=(1, 1))
        assert load(model, directory).cache == "hit"
        shutil.copytree(model, model.parent / "elsewhere" / model.name)
        assert load(model.parent / "elsewhere" / model.name, directory).cache == "hit"
        config = json.loads((model / "config.json").read_text())
        harmless = {"transformers_version": "9", "eos_token_id": [1, 2], "rope_theta": 5.0, "max_position_embeddings": 32}
        (model / "config.json").write_text(json.dumps(config | harmless))
        assert load(model, directory).cache == "hit"
        cut = {"num_attention_heads": 4, "num_key_value_heads": 2}  # the same tensors, other heads
        (model / "config.json").write_text(json.dumps(config | cut | {"head_dim": 4}))
        assert load(model, directory).cache == "miss"

    def test_changed_header_misses_the_cache(self, model: Path, directory: Path) -> None:
        """Two tensors of one shape are swapped: same size, and the time restored."""
        load(model, directory)
        path = model / "model.safetensors"
        before, content = path.stat(), path.read_bytes()
        swapped = content.replace(b"k_proj", b"<swap>").replace(b"v_proj", b"k_proj").replace(b"<swap>", b"v_proj")
        assert len(swapped) == len(content)
        path.write_bytes(swapped)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert load(model, directory).cache == "miss"

    def test_each_precision_has_its_own_file(self, model: Path, directory: Path) -> None:
        for precision in (Precision(), Precision("bfloat16"), Precision("float32", "wint8"), Precision("float32", "wint4")):
            assert load(model, directory, precision=precision).cache == "miss"
            assert load(model, directory, precision=precision).cache == "hit"

    def test_each_layout_has_its_own_file(self, tmp_path: Path, directory: Path) -> None:
        """Paddle's layout is another file with another header."""
        tensors = drawn_tensors(write_config(tmp_path / "paddle", TINY))
        write_safetensors(tmp_path / "paddle" / "model.safetensors", to_paddle_layout(tensors))
        write_checkpoint(tmp_path / "plain", TINY)
        loaded = [load(tmp_path / name, directory) for name in ("plain", "paddle", "plain", "paddle")]
        assert [found.cache for found in loaded] == ["miss", "miss", "hit", "hit"]
        assert weights_of(loaded[0]) == weights_of(loaded[1]) == weights_of(loaded[2]) == weights_of(loaded[3])


class TestChecksums:
    """A remembered checksum is valid as long as no other process can have written to the file."""

    def kept(self, directory: Path) -> dict[str, str]:
        found: dict[str, str] = json.loads((directory / "checksums.json").read_text())
        return found

    def of(self, checksums: Checksums, *paths: Path) -> list[str]:
        return checksums.of([map_file(path) for path in paths], lambda: None)

    def test_checksum_is_remembered_until_the_file_changes(self, model: Path, directory: Path) -> None:
        path, checksums = model / "model.safetensors", Checksums(directory, settled_ns=0)
        (found,) = self.of(checksums, path)
        ((key, value),) = self.kept(directory).items()
        assert value == found
        checksums.path.write_text(json.dumps({key: "as remembered"}))
        assert self.of(checksums, path) == ["as remembered"]
        overwrite_values(path)
        (changed,) = self.of(checksums, path)
        assert changed not in (found, "as remembered")
        assert set(self.kept(directory).values()) == {"as remembered", changed}

    def test_recent_changes_are_not_remembered(self, model: Path, directory: Path) -> None:
        path, checksums = model / "model.safetensors", Checksums(directory, settled_ns=1 << 62)
        assert self.of(checksums, path) == self.of(Checksums(directory / "other"), path)
        assert not checksums.path.exists()

    def test_number_of_checksums_is_bounded(self, model: Path, directory: Path) -> None:
        directory.mkdir(parents=True)
        checksums = Checksums(directory, settled_ns=0)
        checksums.path.write_text(json.dumps({f"{index}": "old" for index in range(5000)}))
        (found,) = self.of(checksums, model / "model.safetensors")
        kept = list(self.kept(directory).values())
        assert len(kept) < 5000
        assert kept[-2:] == ["old", found]

    @pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "\0", "[" * 100_000])
    def test_damaged_checksum_file_is_replaced(self, content: str, model: Path, directory: Path) -> None:
        directory.mkdir(parents=True)
        checksums = Checksums(directory, settled_ns=0)
        checksums.path.write_text(content)
        assert self.of(checksums, model / "model.safetensors") == list(self.kept(directory).values())

    def test_checkpoint_changing_while_read_is_an_error(self, model: Path, directory: Path) -> None:
        def overwrite(done: int, total: int) -> None:
            if done:
                (model / "model.safetensors").touch()

        with pytest.raises(CheckpointError, match="changed while it was read"):
            load_model(model, ModelConfig.read(model), TABLE, 16, overwrite, LoadOptions(cache=WeightCache(directory, LIMIT)))
        assert files(directory) == []


class TestDamage:
    @pytest.mark.parametrize("place", ["head", "first array", "end of the arrays", "index", "last byte"])
    def test_changed_byte_is_detected(self, place: str, model: Path, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
        expected = weights_of(load(model, directory))
        (path,) = packed_files(directory)
        content = bytearray(path.read_bytes())
        index = len(content) - int.from_bytes(content[24:32], sys.byteorder)
        places = {"head": 0, "first array": 2 << 20, "end of the arrays": index - 1, "index": index + 10, "last byte": -1}
        content[places[place]] ^= 1
        path.write_bytes(content)
        found = load(model, directory)
        assert (found.cache, weights_of(found)) == ("damaged", expected)
        assert len([record for record in caplog.records if "cannot be used" in record.getMessage()]) == 1
        assert load(model, directory).cache == "hit"

    @pytest.mark.parametrize("size", [0, 7, 39, 4096, 5000])
    def test_truncated_file_is_replaced(self, size: int, model: Path, directory: Path) -> None:
        expected = weights_of(load(model, directory))
        (path,) = packed_files(directory)
        path.write_bytes(path.read_bytes()[:size])
        found = load(model, directory)
        assert (found.cache, weights_of(found)) == ("damaged", expected)
        assert load(model, directory).cache == "hit"

    def test_foreign_file_is_replaced(self, model: Path, directory: Path) -> None:
        load(model, directory)
        (path,) = packed_files(directory)
        path.write_bytes(b"no such thing" * 1000)
        assert load(model, directory).cache == "damaged"

    def test_irregular_file_is_not_opened(self, model: Path, directory: Path) -> None:
        """Opening a FIFO would wait for its other end."""
        load(model, directory)
        (path,) = packed_files(directory)
        for name in (path.name, "checksums.json"):
            (directory / name).unlink(missing_ok=True)
            os.mkfifo(directory / name)
        os.mkfifo(directory / "other.partial")
        assert load(model, directory).cache == "miss"
        assert load(model, directory).cache == "hit"

    def test_file_with_other_arrays_is_replaced(self, model: Path, directory: Path, tmp_path: Path) -> None:
        """A complete file under the wrong name."""
        load(model, directory)
        (path,) = packed_files(directory)
        write_checkpoint(tmp_path / "other", {**TINY, "intermediate_size": 40})
        load(tmp_path / "other", directory)
        (other,) = set(packed_files(directory)) - {path}
        os.replace(other, path)
        assert load(model, directory).cache == "damaged"
        assert load(model, directory).cache == "hit"

    def test_file_with_other_contents_is_replaced(self, model: Path, directory: Path, tmp_path: Path) -> None:
        """A complete file under the wrong name, with the right shapes."""
        first = load(model, directory)
        (path,) = packed_files(directory)
        shutil.copytree(model, tmp_path / "other")
        overwrite_values(tmp_path / "other" / "model.safetensors")
        load(tmp_path / "other", directory)
        (other,) = set(packed_files(directory)) - {path}
        for contents in ("", first.contents):
            shutil.copy(other, path)
            cache = WeightCache(directory, LIMIT)
            config = ModelConfig.read(model)
            found = load_model(model, config, TABLE, 16, lambda done, total: None, LoadOptions(cache=cache, contents=contents))
            assert (found.cache, weights_of(found)) == ("damaged", weights_of(load(model, None)))
            assert load(model, directory).cache == "hit"


class TestWriters:
    def test_partial_file_of_a_dead_writer_is_replaced(self, model: Path, directory: Path) -> None:
        """SIGKILL while it packs: the next one replaces its partial file, which is never read."""
        with _held_writer(model, directory) as process:
            assert [name.endswith(".partial") for name in files(directory)] == [True]
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        assert [name.endswith(".partial") for name in files(directory)] == [True]
        assert load(model, directory).cache == "miss"
        assert [name.endswith(".weights") for name in files(directory)] == [True]
        assert load(model, directory).cache == "hit"

    def test_leftovers_of_other_weights_are_removed(self, model: Path, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "other-1.partial").write_bytes(b"x" * 100)
        with (directory / "other-2.partial").open("wb") as living:
            fcntl.flock(living, fcntl.LOCK_EX)
            load(model, directory)
            assert "other-1.partial" not in files(directory)
            assert "other-2.partial" in files(directory)

    def test_symbolic_link_is_not_followed(self, model: Path, directory: Path, tmp_path: Path) -> None:
        """The link is by another user who may write to the directory."""
        load(model, directory)
        (path,) = packed_files(directory)
        path.unlink()
        other = tmp_path / "other"
        other.write_bytes(b"somebody's")
        path.with_suffix(".partial").symlink_to(other)
        assert load(model, directory).cache == "miss"
        assert other.read_bytes() == b"somebody's"

    def test_concurrent_writers_store_one_file(self, model: Path, directory: Path) -> None:
        """One writes, and the other packs into memory; the file is that of the first."""
        with _held_writer(model, directory) as process:
            found = load(model, directory)
            assert (found.cache, weights_of(found)) == ("miss", weights_of(load(model, None)))
            assert [name.endswith(".partial") for name in files(directory)] == [True]
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert process.wait(60) == 0
        assert load(model, directory).cache == "hit"


class TestRanks:
    """Several ranks of one engine, which share one file."""

    @pytest.mark.parametrize("dies", [False, True])
    def test_other_ranks_wait_for_the_packing_one(self, model: Path, directory: Path, dies: bool) -> None:
        """If it dies another one packs instead; none packs into memory of its own."""
        waited = Event()
        with _held_writer(model, directory) as process, ThreadPoolExecutor(2) as ranks:
            found = [ranks.submit(self.load, model, directory, on_progress=lambda done, total: waited.set()) for _ in range(2)]
            for _ in range(3):  # also while nothing gets on
                assert waited.wait(60)
                waited.clear()
            assert not any(rank.done() for rank in found)
            assert process.stdin is not None
            process.kill() if dies else print("go on", file=process.stdin, flush=True)
            loaded = [rank.result(60) for rank in found]
        expected = weights_of(load(model, None))
        assert [weights_of(rank) for rank in loaded] == [expected] * 2
        assert [name.endswith(".weights") for name in files(directory)] == [True]
        (file,) = packed_files(directory)
        mapped = Path("/proc/self/maps").read_text().splitlines()
        assert sum(line.endswith(str(file)) for line in mapped) >= 2  # both use it

    def test_rank_maps_its_part_of_the_file(self, tmp_path: Path, directory: Path) -> None:
        write_checkpoint(tmp_path / "wide", {**TINY, "hidden_size": 64, "intermediate_size": 128})
        assert load(tmp_path / "wide", directory).cache == "miss"
        assert self.load(tmp_path / "wide", directory, share=TensorShare(1, 2)).cache == "hit"

    def test_random_weights_are_shared(self, model: Path, directory: Path) -> None:
        found = [self.load(model, directory, random_seed=seed) for seed in (1, 1, 2)]
        assert weights_of(found[0]) == weights_of(found[1]) != weights_of(found[2])
        assert len(packed_files(directory)) == 2

    def test_run_directory_keeps_files_in_use(self, model: Path, tmp_path: Path, directory: Path) -> None:
        write_checkpoint(tmp_path / "next", {**TINY, "rope_theta": 5.0})
        write_checkpoint(tmp_path / "last", {**TINY, "rope_theta": 6.0})
        first = self.load(model, directory, is_run=True)
        self.load(tmp_path / "next", directory, is_run=True)
        assert len(packed_files(directory)) == 2
        assert weights_of(first)
        del first
        self.load(tmp_path / "last", directory, is_run=True)
        assert [name.split("-")[0] for name in files(directory)] == ["last"]

    def load(
        self,
        path: Path,
        directory: Path,
        *,
        on_progress: Progress = lambda done, total: None,
        is_run: bool = False,
        random_seed: int | None = None,
        share: TensorShare = TensorShare(),  # noqa: B008
    ) -> LoadedModel:
        cache = WeightCache(directory, LIMIT, is_shared=True, is_run=is_run)
        options = LoadOptions(cache=cache, random_seed=random_seed)
        return load_model(path, ModelConfig.read(path), TABLE, 16, on_progress, options, share=share)


class _held_writer:
    """Start a process that packs `model` into the cache and stops in the middle until it reads a line."""

    PROGRAM = """
import sys
from pathlib import Path
from engine.checkpoint.model_config import ModelConfig
from ops.cpu.table import TABLE
from workers.models.loading import load_model
from workers.weights.cache import WeightCache
from workers.weights.loader import LoadOptions

calls = []

def hold(done, total):
    calls.append(done)
    if len(calls) == 3:
        print("held", flush=True)
        sys.stdin.readline()

path = Path(sys.argv[1])
load_model(path, ModelConfig.read(path), TABLE, 16, hold, LoadOptions(cache=WeightCache(Path(sys.argv[2]), 1 << 30)))
"""

    def __init__(self, model: Path, directory: Path) -> None:
        self._arguments = [sys.executable, "-c", self.PROGRAM, str(model), str(directory)]

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "held\n"
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class TestLimit:
    def test_least_recently_used_goes_first(self, tmp_path: Path, directory: Path) -> None:
        models = []
        for index in range(3):
            write_checkpoint(tmp_path / f"m{index}", {**TINY, "rope_theta": 1000.0 + index})
            models.append(tmp_path / f"m{index}")
        load(models[0], directory)
        size = packed_files(directory)[0].stat().st_size
        load(models[1], directory, limit=2 * size + 100)
        assert load(models[0], directory, limit=2 * size + 100).cache == "hit"
        load(models[2], directory, limit=2 * size + 100)
        assert [load(model, directory, limit=2 * size + 100).cache for model in (models[0], models[2])] == ["hit", "hit"]
        assert [name.split("-")[0] for name in files(directory)] == ["m0", "m2"]

    def test_files_in_use_stay(self, model: Path, tmp_path: Path, directory: Path) -> None:
        used = load(model, directory)
        size = packed_files(directory)[0].stat().st_size
        write_checkpoint(tmp_path / "other", {**TINY, "rope_theta": 5.0})
        assert load(tmp_path / "other", directory, limit=size + 100).cache == "miss"
        assert [name.split("-")[0] for name in files(directory)] == ["model"]
        assert weights_of(used)
        del used
        load(tmp_path / "other", directory, limit=size + 100)
        assert [name.split("-")[0] for name in files(directory)] == ["other"]

    def test_weights_above_the_limit_are_not_stored(
        self, model: Path, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = load(model, directory, limit=1000)
        assert weights_of(found) == weights_of(load(model, None))
        assert files(directory) == []
        assert len([record for record in caplog.records if "--weight-cache-limit" in record.getMessage()]) == 1


class TestWithoutRoom:
    def test_full_disk_does_not_fail_the_load(self, model: Path, directory: Path) -> None:
        """Run in a process with a limit on file sizes, which must not apply to the writer of the test's report."""
        program = f"""
import logging, resource
from tests.workers.weights.test_cache import Path, load, weights_of

logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
found = load(Path({str(model)!r}), Path({str(directory)!r}))
print(found.cache, weights_of(found) == weights_of(load(Path({str(model)!r}), None)))
"""
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert answer.stdout.split() == ["miss", "True"], answer.stderr
        assert answer.stderr.count("cannot be stored") == 1
        assert files(directory) == []

    def test_failed_write_leaves_nothing(self, directory: Path) -> None:
        """No file, no descriptor, and no thread that would write to a reused descriptor."""
        shape = (8 * _cpu.num_threads() + 8 << 20,)  # more than is gathered: the thread has begun
        layout = Layout()
        layout.keep("a", shape, np.dtype(np.uint8), lambda array: None)
        descriptors = os.listdir("/proc/self/fd")
        kept = WeightCache(directory, LIMIT).writer("w", layout, {})
        writer = kept.__enter__()
        assert writer is not None
        writer.keep("a", shape, np.dtype(np.uint8), lambda array: array.fill(1))
        assert len(writing_threads()) == 1
        assert not kept.__exit__(OSError, OSError(errno.EDQUOT, "full"), None)
        assert (files(directory), writing_threads()) == ([], [])
        assert os.listdir("/proc/self/fd") == descriptors

    def test_unusable_directory_is_logged(self, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("")
        found = load(model, tmp_path / "file" / "cache")
        assert (found.cache, weights_of(found)) == ("miss", weights_of(load(model, None)))
        assert len([record for record in caplog.records if "cannot be stored" in record.getMessage()]) == 1

    def test_read_only_directory_is_used(self, model: Path, directory: Path) -> None:
        """Stored files are read, none is written. In a process without root permissions."""
        load(model, directory)
        write_checkpoint(model.parent / "other", {**TINY, "rope_theta": 5.0})
        directory.chmod(0o555)
        program = f"""
import ctypes
from tests.workers.weights.test_cache import load, Path

nothing = (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) == 0
for name in ("model", "other"):
    print(load(Path({str(model.parent)!r}) / name, Path({str(directory)!r})).cache)
"""
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        directory.chmod(0o755)
        assert answer.stdout.split() == ["hit", "miss"], answer.stderr
        assert len(files(directory)) == 1


class TestRunner:
    def answer(self, runner: ModelRunner) -> tuple[object, ...]:
        sequence = ServedSequence([5, 9, 3, 30], SamplingParams(temperature=0.0, num_logprobs=3), 8)
        serving = Serving(runner)
        serving.place(sequence, 0)
        serving.run([sequence])
        return sequence.answer()

    def runner(self, path: Path, **options: Any) -> ModelRunner:
        return make_runner(path, max_model_len=64, num_kv_blocks=16, max_num_seqs=4, **options)

    def test_cached_weights_give_the_same_answers(self, model: Path, directory: Path) -> None:
        runners = [self.runner(model, weight_cache_dir=str(directory)) for _ in range(2)]
        runners.append(self.runner(model))
        assert [runner.weights.cache for runner in runners] == ["miss", "hit", "off"]
        answers = [self.answer(runner) for runner in runners]
        assert answers[0] == answers[1] == answers[2]

    def test_reload_uses_the_cache(self, model: Path, tmp_path: Path, directory: Path) -> None:
        config = write_config(tmp_path / "second", TINY)
        tensors = {name: values * np.float32(1.5) for name, values in drawn_tensors(config).items()}
        write_safetensors(tmp_path / "second" / "model.safetensors", tensors)
        runner = self.runner(model, weight_cache_dir=str(directory))
        before = self.answer(runner)
        outcomes = []
        for version, path in enumerate((tmp_path / "second", model, tmp_path / "second"), 2):
            runner.load(str(path), version, lambda done, total: None)
            outcomes.append((runner.weights.cache, self.answer(runner) == before))
        assert outcomes == [("miss", False), ("hit", True), ("hit", False)]

    def test_reload_of_an_overwritten_checkpoint(self, model: Path, directory: Path) -> None:
        """Files are overwritten in place, and only their contents differ: answers come from the present contents."""
        runner = self.runner(model, weight_cache_dir=str(directory))
        before = self.answer(runner)
        overwrite_values(model / "model.safetensors")
        runner.load(str(model), 2, lambda done, total: None)
        assert (runner.weights.version, runner.weights.cache) == (2, "miss")
        assert before != self.answer(runner) == self.answer(self.runner(model))

    def test_random_weights_are_not_stored(self, model: Path, directory: Path) -> None:
        runner = self.runner(model, load_format="dummy", weight_cache_dir=str(directory))
        assert (runner.weights.cache, files(directory)) == ("off", [])

    def test_reference_ops_store_nothing(self, model: Path, directory: Path) -> None:
        runner = self.runner(model, ops="reference", plan="eager", weight_cache_dir=str(directory))
        assert (runner.weights.cache, files(directory)) == ("off", [])


def test_checksum_does_not_depend_on_threads() -> None:
    values = np.random.default_rng(0).integers(0, 256, (5 << 20) + 13, np.uint8)
    before = _cpu.num_threads()
    found = []
    for count in (1, 2, 3):
        _cpu.set_num_threads(count)
        found.append(_cpu.checksum(values.ctypes.data, len(values)))
    _cpu.set_num_threads(before)
    assert len(set(found)) == 1
    for place in (0, 1 << 20, len(values) - 1):
        values[place] ^= 1
        assert _cpu.checksum(values.ctypes.data, len(values)) not in found
        values[place] ^= 1
