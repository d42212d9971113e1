"""The kernels of an engine: timed once, stored, and validated against foreign files in their place."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from engine.errors import OptionError
from ops import _cpu
from ops.cpu.choice import ATTENTION, BASE, LINEARS, TIMED, choose
from workers.devices.kernels import Timing, kernels, select, timed, timing

PARTS = {BASE, ATTENTION, *LINEARS}
CANDIDATES = [name for name in _cpu.candidates() if name != "portable"] or ["portable"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File written by one timing."""
    directory = tmp_path_factory.mktemp("kernels") / "new"
    timing(directory)
    (path,) = directory.iterdir()
    return path


def put(path: Path, content: bytes) -> Path:
    """Write a file of this name and content in a directory of its own."""
    path.write_bytes(content)
    return path


def test_every_kernel_is_timed_and_stored(kept: Path) -> None:
    found = timing(kept.parent)
    assert set(found.chosen) == set(TIMED)
    for part, times in found.seconds.items():
        assert list(times) == CANDIDATES
        assert all(0 < each_s < 60 for seconds in times.values() for each_s in seconds)
        assert found.chosen[part] == choose(times, CANDIDATES)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_stored_timings_are_used(kept: Path, tmp_path: Path) -> None:
    """A stored choice is used without timing, even one that the timings do not give."""
    other = {part: CANDIDATES[index % len(CANDIDATES)] for index, part in enumerate(TIMED)}
    answer = msgspec.structs.replace(timing(kept.parent), chosen=other)
    put(tmp_path / kept.name, msgspec.json.encode(answer))
    assert timing(tmp_path) == answer
    for kv_dtype in ("float32", "bfloat16", "int8"):
        found = kernels("auto", kv_dtype, tmp_path)
        assert found.keys() == PARTS
        assert found[BASE] == _cpu.candidates()[-1]
        assert found[ATTENTION] == other[f"attention {kv_dtype}"]
        assert {part: found[part] for part in LINEARS} == {part: other[part] for part in LINEARS}


@pytest.mark.slow
def test_invalid_timing_file_is_measured_again(kept: Path, tmp_path: Path) -> None:
    true = timing(kept.parent)
    chosen = {**true.chosen, "int8": "sse9"}
    seconds = {part: {**times, CANDIDATES[0]: [0.0] * len(times[CANDIDATES[0]])} for part, times in true.seconds.items()}
    wrong = [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff" * 1000,
        b'{"key": 7}',
        kept.read_bytes()[:-20],
        msgspec.json.encode({"key": true.key, "chosen": true.chosen, "seconds": true.seconds, "more": 1}),
        msgspec.json.encode(msgspec.structs.replace(true, key="0" * 16)),
        msgspec.json.encode(msgspec.structs.replace(true, chosen=chosen)),
        msgspec.json.encode(msgspec.structs.replace(true, chosen={"int8": CANDIDATES[0]})),
        msgspec.json.encode(msgspec.structs.replace(true, seconds={"int8": {}})),
        *([msgspec.json.encode(msgspec.structs.replace(true, seconds=seconds))] if seconds else []),
    ]
    for content in wrong:
        assert Timing.read(put(tmp_path / kept.name, content), true.key, CANDIDATES) is None, content[:200]
    assert Timing.read(put(tmp_path / kept.name, kept.read_bytes()), true.key, CANDIDATES) == true
    put(tmp_path / kept.name, wrong[1])
    assert timing(tmp_path).key == true.key
    assert Timing.read(tmp_path / kept.name, true.key, CANDIDATES) is not None
    (tmp_path / kept.name).unlink()
    os.mkfifo(tmp_path / kept.name)
    assert timing(tmp_path).key == true.key
    assert (tmp_path / kept.name).is_file()


def test_unwritable_directory_is_logged(kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert timing(tmp_path / "file").chosen.keys() == set(TIMED)
    assert "kernel timings cannot be stored in" in caplog.text


def test_pinned_variant_is_used_without_timing(tmp_path: Path) -> None:
    for variant in _cpu.variants():
        assert kernels(variant, "float32", tmp_path / "none") == dict.fromkeys(PARTS, variant)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("variant", "cause"),
    [
        ("sse9", "there is no such variant"),
        *((name, "it is not built") for name, is_built, is_runnable in _cpu.known_variants() if is_runnable and not is_built),
        *((name, "this processor does not support it") for name, _, is_runnable in _cpu.known_variants() if not is_runnable),
    ],
)
def test_unusable_pinned_variant_is_refused(variant: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as raised:
        kernels(variant, "float32", tmp_path)
    assert str(raised.value).startswith(f"--cpu-kernels {variant}: {cause}")
    assert str(raised.value).endswith(f"available here: auto, {', '.join(_cpu.candidates())}")


def test_worker_selects_the_chosen_variants() -> None:
    """The base is selected first, whatever the order; an empty choice selects nothing."""
    before, variants = _cpu.variant(), _cpu.variants()
    try:
        select({"int8": variants[0], ATTENTION: variants[0], BASE: variants[-1]})
        assert (_cpu.variant(), _cpu.variant_of("int8"), _cpu.variant_of("int4")) == (variants[-1], variants[0], variants[-1])
        assert _cpu.variant_of(ATTENTION) == variants[0]
        select({})
        assert _cpu.variant_of("int8") == variants[0]
        with pytest.raises(
            OptionError, match=r"the engine was started with amx9 kernels \(int4\), which are no longer available"
        ):
            select({BASE: variants[-1], "int4": "amx9"})
    finally:
        _cpu.select(before)


def test_failing_kernels_are_left_out() -> None:
    """A processor may offer instructions on which it faults."""
    found, seconds = timed([*CANDIDATES[-2:], "sse9"])
    assert found == CANDIDATES[-2:]
    assert seconds.keys() == (set(TIMED) if len(found) > 1 else set())
