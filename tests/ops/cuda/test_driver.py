"""Kernels on a card by its driver alone. The card is emulated (`tests/devices/libcuda.cpp`); NVRTC compiles kernels for
cards that are not there."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from ops.cuda.compiler import Compiler, find_nvrtc, newest_nvrtcs
from ops.cuda.library import BuildError, Library, RowError, build, host_command
from ops.cuda.operands import TYPES, operands
from shm.cuda_driver import CudaDriver
from tests.native_program import build_program
from tests.ops.cuda.card import emulated_library
from workers.devices.card_kernels import CardKernels, card_library


class CardFailure(Exception):
    """An error of the driver."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> CudaDriver:
    directory = tmp_path_factory.mktemp("driver")
    path = build_program(directory, "tests/devices/libcuda.cpp", flags=("-shared", "-fPIC"))
    return CudaDriver(str(path), 0, CardFailure)


@pytest.fixture(scope="module")
def card(driver: CudaDriver) -> Library:
    return Library(emulated_library(), CardKernels(driver, emulated_library(), Path("/nowhere")))


class LinearOnCard:
    """y = x W + b of some rows, with operands in the memory of a card."""

    def __init__(self, driver: CudaDriver) -> None:
        random = np.random.default_rng(5)
        self._driver = driver
        self.x, weight = (random.standard_normal((count, 32), np.float32) for count in (3, 8))
        bias = random.standard_normal(8, np.float32)
        self.expected = self.x @ weight.T + bias
        self.addresses = {}
        given = {}
        for name, host in (
            ("x", self.x),
            ("weight", weight.view(np.uint8)),
            ("bias", bias),
            ("y", np.zeros((3, 8), np.float32)),
        ):
            address = driver.made("cuMemAlloc_v2", host.nbytes)
            driver.call("cuMemcpyHtoD_v2", address, host.ctypes.data, host.nbytes)
            self.addresses[name], given[name] = address, (address, host.nbytes)
        weights = {"values": "weight", "scales": None, "offsets": None, "type": 0, "num_inputs": 32, "padded_inputs": 32}
        weights |= {"num_outputs": 8, "group_size": 32, "num_parts": 8}
        values = {
            "type": TYPES["float32"],
            "x": "x",
            "y": "y",
            "floats": None,
            "weights": weights,
            "bias": "bias",
            "parts": None,
            "arrivals": None,
            "num_rows": 3,
        }
        self.operands = operands("Linear", lambda name: given[name], **values)

    def change(self, x: np.ndarray) -> None:
        self._driver.call("cuMemcpyHtoD_v2", self.addresses["x"], x.ctypes.data, x.nbytes)

    def landed(self) -> np.ndarray:
        """Return y as it is now, without waiting for earlier work."""
        return np.array((ctypes.c_float * 24).from_address(self.addresses["y"])).reshape(3, 8)


def test_kernels_run_when_someone_waits(driver: CudaDriver, card: Library) -> None:
    linear, stream = LinearOnCard(driver), driver.made("cuStreamCreate", 1)
    card.run("Linear", linear.operands, stream)
    assert not linear.landed().any()
    driver.call("cuStreamSynchronize", stream)
    np.testing.assert_allclose(linear.landed(), linear.expected, atol=1e-5)


def test_graphs_repeat_what_was_captured(driver: CudaDriver, card: Library) -> None:
    linear, stream = LinearOnCard(driver), driver.made("cuStreamCreate", 1)
    driver.call("cuStreamBeginCapture_v2", stream, 1)
    card.run("Linear", linear.operands, stream)
    graph = ctypes.c_void_p()
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    executable = driver.made("cuGraphInstantiateWithFlags", graph, 0)
    driver.call("cuStreamSynchronize", stream)
    assert not linear.landed().any()
    for factor in (1.0, 2.0):
        linear.change(linear.x * np.float32(factor))
        driver.call("cuGraphLaunch", executable, stream)
        driver.call("cuStreamSynchronize", stream)
        np.testing.assert_allclose(linear.landed() - linear.expected, (factor - 1) * (linear.x @ weight_of(linear)), atol=1e-4)


def weight_of(linear: LinearOnCard) -> np.ndarray:
    return np.array((ctypes.c_float * 256).from_address(linear.addresses["weight"])).reshape(8, 32).T


def test_card_and_emulation_share_a_process(driver: CudaDriver, card: Library) -> None:
    """The rows' check on a card compares the two."""
    here, there = LinearOnCard(driver), LinearOnCard(driver)
    Library(emulated_library()).run("Linear", here.operands)
    card.run("Linear", there.operands)
    assert here.landed().any()
    assert not there.landed().any()
    driver.call("cuCtxSynchronize")
    np.testing.assert_array_equal(here.landed(), there.landed())


def test_unknown_kernel_is_named(driver: CudaDriver) -> None:
    class Without:
        launch_address = driver.address_of("cuLaunchKernel")

        def function(self, name: str, num_shared_bytes: int) -> int:
            raise BuildError(f"there is no {name}")

        def error_name(self, status: int) -> str:
            return driver.error_name(status)

    with pytest.raises(RowError, match="Linear: there is no linear_of_tiles<float, float, 16>"):
        Library(emulated_library(), Without()).run("Linear", LinearOnCard(driver).operands)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (99, 0)])
def test_kernels_compile_for_each_card(capability: tuple[int, int], tmp_path: Path) -> None:
    """Cubins, or PTX for a card that is newer than NVRTC."""
    image = Compiler(find_nvrtc(), capability, tmp_path).image("combine<Bfloat16>")
    assert image.code.startswith(b"//" if capability == (99, 0) else b"\x7fELF")
    assert "combine" in image.entry


def test_kernels_are_compiled_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second start reads them from a file, if a crash of the machine has not truncated it."""
    caplog.set_level(logging.INFO)
    compiler, names = Compiler(find_nvrtc(), (9, 0), tmp_path), ["combine<Bfloat16>", "begin"]
    compiler.prepare(names)
    image = compiler.image("combine<Bfloat16>")
    again = Compiler(find_nvrtc(), (9, 0), tmp_path)
    again.prepare(names)
    assert again.image("combine<Bfloat16>") == image
    for file in tmp_path.glob("*.kernel"):
        os.truncate(file, 100)
    made = again.image("combine<Bfloat16>")  # names in it differ
    assert len(made.code) == len(image.code)
    assert compiler.image("combine<Bfloat16>") == made
    assert [record.getMessage().split(" for ")[0] for record in caplog.records if "compiling" in record.getMessage()] == [
        "compiling 2 kernels"
    ]


@pytest.mark.slow
def test_nvrtc_12_compiles_every_source(tmp_path: Path) -> None:
    """A kernel of each. It refuses some C++ that NVRTC 13 takes."""
    (path,) = (path for path in newest_nvrtcs() if path.endswith(".so.12"))
    compiler = Compiler(path, (8, 0), tmp_path)
    of_sources = {compiler.source_of(name): name for name in Library(emulated_library()).kernel_names}
    compiler.prepare(of_sources.values())
    assert len(list(tmp_path.glob("*.kernel"))) == len(of_sources) > 10


def test_every_kernel_is_found_in_its_source() -> None:
    compiler = Compiler(find_nvrtc(), (9, 0), Path("/nowhere"))
    names = Library(emulated_library()).kernel_names
    assert len(names) > 50
    assert all(compiler.source_of(name).endswith(".cu") for name in names)


@pytest.mark.parametrize(
    ("found", "driver_version", "says"),
    [
        ([], 13000, "NVRTC was not found"),
        ([11], 13000, "NVRTC 11 is too old, the kernels need NVRTC 12"),
        ([13], 11080, "this driver is of CUDA 11, but the kernels need CUDA 12; update the driver"),
        ([13, 11], 12090, "NVRTC 13 compiles .* of CUDA 12, cannot load; run pip install nvidia-cuda-nvrtc-cu12, or update"),
        ([14], 13000, r"NVRTC 14 compiles .* run pip install 'nvidia-cuda-nvrtc==13\.\*', or update"),
    ],
)
def test_unusable_nvrtc_is_refused(
    found: list[int], driver_version: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in found:
        (tmp_path / f"libnvrtc.so.{version}").touch()
    monkeypatch.setattr("ops.cuda.compiler._PLACES", (f"{tmp_path}/libnvrtc.so.[0-9]*",))
    with pytest.raises(BuildError, match=says):
        find_nvrtc(driver_version)


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        BuildError, match="file/cuda cannot be written: Not a directory; make room there, or set XDG_CACHE_HOME"
    ):
        build(host_command(), tmp_path / "file" / "cuda")
    broken = tmp_path / "broken.so"
    broken.touch()
    with pytest.raises(BuildError, match=r"broken\.so.*; delete it to have it built again"):
        Library(broken)


def test_old_card_is_refused(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBCUDA_CAPABILITY", "7.5")
    with pytest.raises(BuildError, match=r"no card at all has compute capability 7.5, but the kernels need 8.0"):
        card_library(driver, emulated_library().parent)
