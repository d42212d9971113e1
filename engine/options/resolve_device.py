"""Device, ops and plan of an engine, checked against the machine's cards and the installed Paddle. Used by `resolve.py`.

Native ops on the CPU and CUDA ops on NVIDIA's cards do not use Paddle. Cards and Paddle are queried in a separate process, once
per start, because only workers load the driver and Paddle.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from engine.errors import OptionError
from engine.installation import CUDA_DRIVER, DISTRIBUTION, IS_CHECKOUT, PACKAGES

INDEX = "https://www.paddlepaddle.org.cn/packages/stable"
WHEELS = {  # Paddle builds for each device, and the channel in Paddle's own index: PyPI has neither of the last two
    "cpu": ("paddlepaddle", ""),
    "gpu": ("paddlepaddle-gpu", f"{INDEX}/cu126/"),
    "xpu": ("paddlepaddle-xpu", f"{INDEX}/xpu-p800/"),
}
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")  # distributions of the compiler of our kernels
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")  # NVIDIA devices on Linux, and on Windows (WSL2)
ARENA_LIBRARIES = {"gpu": CUDA_DRIVER}  # devices with memory that can survive its process
_LONGEST_S = 120.0  # seconds that Paddle may take to load
LEAST_CAPABILITY = (8, 0)  # of GPUs, for our kernels (`OLDEST` in `ops/cuda/compiler.py`)
_EMULATED = (0, 0)  # compute capability of the tests' card
_QUESTION = (
    f"""
import json, sys
from ops.cuda.compiler import EMULATED, find_nvrtc
from ops.cuda.library import BuildError, host_command
from shm.cuda_driver import DriverLibrary
from shm.errors import SharedMemoryError
asked, memory = {{"gpus": [], "driver_error": "", "compiler_error": ""}}, {{}}
try:
    for card in DriverLibrary({CUDA_DRIVER!r}, SharedMemoryError).cards():
        asked["gpus"].append([card.name, card.capability])
        memory["gpu"] = min(memory.get("gpu", card.num_bytes), card.num_bytes)
        if card.capability != EMULATED:
            find_nvrtc(card.driver_version)
    host_command()
except SharedMemoryError as error:
    asked["driver_error"] = str(error)
except BuildError as error:
    asked["compiler_error"] = str(error)
"""
    + f"""
is_served = all(tuple(each) == {_EMULATED} or tuple(each) >= {LEAST_CAPABILITY} for _, each in asked["gpus"])
if "without paddle" in sys.argv and asked["gpus"] and is_served and not asked["compiler_error"]:
    print(json.dumps({{"version": "", "cards": {{}}, "error": "it was not loaded", "memory": memory, **asked}}))
    raise SystemExit
"""
    + """
try:
    import paddle
    from paddle.base import core
except Exception as error:  # a plugin that does not load has several lines, the first with the cause
    text = repr(error) if isinstance(error, ImportError) else str(error).splitlines()[0]
    print(json.dumps({"version": "", "cards": {}, "error": text, "memory": memory, **asked}))
    raise SystemExit
cards = {kind: core.get_custom_device_count(kind) for kind in paddle.device.get_all_custom_device_type() or []}
if paddle.is_compiled_with_cuda():
    cards["gpu"] = paddle.device.cuda.device_count()
    of_card = [paddle.device.cuda.get_device_properties(card).total_memory for card in range(cards["gpu"])]
    memory["gpu"] = min(of_card, default=0)
if paddle.is_compiled_with_xpu():
    cards["xpu"] = paddle.device.xpu.device_count()
    memory["xpu"] = min((paddle.device.xpu.memory_total(card) for card in range(cards["xpu"])), default=0)
print(json.dumps({"version": paddle.__version__, "cards": cards, "memory": memory, **asked}))
"""
)


class InstalledPaddle(msgspec.Struct, frozen=True):
    """The installed Paddle: its version and devices."""

    version: str  # "": none
    cards: dict[str, int]  # number of devices by name, for devices of this build or of plugins; without the CPU
    error: str = ""  # why it cannot be used
    memory: dict[str, int] = {}  # bytes of the smallest device of each kind, if Paddle or the driver reports them
    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()  # name and compute capability of each, as the driver reports them
    driver_error: str = ""  # why NVIDIA's driver cannot be used
    compiler_error: str = ""  # why kernels for these cannot be compiled

    @property
    def text(self) -> str:
        counts = ", ".join(f"{name} ({count} cards)" for name, count in sorted(self.cards.items()))
        return f"Paddle {self.version} with cpu{', ' if counts else ''}{counts}"


AskPaddle = Callable[[], InstalledPaddle]


def installed_paddle(*, serves_cuda: bool = False) -> InstalledPaddle:
    """Return the Paddle that a process finds when it imports it, which takes seconds. `serves_cuda`: the ops are CUDA's if they
    can be; then Paddle is not imported."""
    command = [sys.executable, "-W", "ignore", "-c", _QUESTION, *(["without paddle"] if serves_cuda else [])]
    try:  # in an empty directory: nothing there can be mistaken for Paddle
        done = subprocess.run(command, cwd=PACKAGES, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return InstalledPaddle("", {}, f"it did not load within {_LONGEST_S:.0f} s")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else "", type=InstalledPaddle)
    except msgspec.DecodeError:
        return InstalledPaddle("", {}, f"exit code {done.returncode}: {(done.stderr.strip() or '-').splitlines()[-1]}")


def asking_paddle(device: str, ops: str) -> AskPaddle:
    """Return the question to this machine for what is asked for."""
    are_cuda = device in ("auto", "gpu") and ops in ("auto", "cuda")
    return functools.partial(installed_paddle, serves_cuda=are_cuda)


def resolve_device(asked: str, ops: str, num_ranks: int, ask: AskPaddle) -> str:
    """Return the device for `asked`. Raises OptionError if this Paddle does not support it, or has fewer devices than ranks."""
    if asked == "auto":
        asked = "gpu" if has_node() and any(map(has_distribution, (*_NVRTC, WHEELS["gpu"][0]))) else "cpu"
    if asked == "cpu":
        if ops not in ("auto", "native") and not any(has_distribution(name) for name, _ in WHEELS.values()):
            raise OptionError(f"--ops {ops} on --device cpu needs Paddle, which is not installed; {remedy('cpu')}")
        return asked
    missing = list(_missing(asked, ops, num_ranks, ask()))
    if missing:
        raise OptionError(". Also missing: ".join(missing))
    return asked


def _missing(asked: str, ops: str, num_ranks: int, found: InstalledPaddle) -> Iterator[str]:
    """Yield everything that the device lacks, with remedies."""
    if asked != "gpu" or ops not in ("auto", "cuda"):
        yield from _missing_for_paddle(asked, num_ranks, found)
        return
    missing = list(_missing_for_cuda(num_ranks, found))
    if missing and (ops == "cuda" or any(_missing_for_paddle(asked, num_ranks, found))):  # else those of Paddle serve
        yield from missing


def _missing_for_paddle(asked: str, num_ranks: int, found: InstalledPaddle) -> Iterator[str]:
    if asked == "gpu" and found.driver_error:
        yield f"--device gpu needs NVIDIA's driver: {found.driver_error}; install it, or use --device cpu"
    if not found.version:
        cause = f" ({found.error})" if found.error else ""
        yield f"--device {asked} needs Paddle, which is not installed or cannot be loaded{cause}; {remedy(asked)}"
    elif asked not in found.cards:
        yield f"--device {asked} is not supported by the installed {found.text}; {remedy(asked)}"
    elif (count := found.cards[asked]) < num_ranks and not (asked == "gpu" and found.driver_error):
        yield f"{_too_few(asked, num_ranks)}, but Paddle {found.version} finds {count}; {_fewer_ranks(count)}"


def _missing_for_cuda(num_ranks: int, found: InstalledPaddle) -> Iterator[str]:
    """Yield what CUDA ops lack: they need a driver, a card for each rank and a compiler, but no Paddle."""
    if found.driver_error:
        yield f"--device gpu needs NVIDIA's driver: {found.driver_error}; install it, or use --device cpu"
    elif (count := len(found.gpus)) < num_ranks:
        yield f"{_too_few('gpu', num_ranks)}, but the driver finds {count}; {_fewer_ranks(count)}"
    for number, (name, capability) in enumerate(found.gpus[:num_ranks]):
        if _EMULATED != capability < LEAST_CAPABILITY:
            yield (
                f"GPU {number} ({name}) has compute capability {'.'.join(map(str, capability))}, but at least "
                f"{'.'.join(map(str, LEAST_CAPABILITY))} is needed; use a newer one (CUDA_VISIBLE_DEVICES chooses), "
                "--ops fused or --device cpu"
            )
    if found.compiler_error:
        yield f"--device gpu compiles its kernels, but cannot: {found.compiler_error}"


def _too_few(asked: str, num_ranks: int) -> str:
    ranks = "ranks (--tensor-parallel-size times --data-parallel-size)"
    return f"--device {asked}: {num_ranks} {ranks} need one device each"


def _fewer_ranks(count: int) -> str:
    return (
        f"use at most {count}, or make more devices visible"
        if count
        else "make some visible (CUDA_VISIBLE_DEVICES), or use --device cpu"
    )


def has_node(nodes: tuple[str, ...] = GPU_NODES) -> bool:
    """Return whether the machine has an NVIDIA device."""
    return any(Path(node).exists() for node in nodes)


def remedy(device: str) -> str:
    """Return how to install support for the device."""
    if device not in WHEELS:
        return "install the plugin of the custom device for this Paddle (CUSTOM_DEVICE_ROOT is its directory)"
    wheel, index = WHEELS[device]
    where = f" --extra-index-url {index}" if index else ""
    script = f" or TOKAMAK_EXTRA={device} tools/serve" if IS_CHECKOUT else ""
    return f"run pip install '{DISTRIBUTION}[{device}]'{where} ({wheel}){script}"


def resolve_ops(asked: str, device: str, num_ranks: int, ask: AskPaddle, *, allows_variant: bool) -> str:
    """Return the op table for `asked` on `device`."""
    found = _ops(asked, device)
    if found == "auto":  # of a GPU
        found = "fused" if any(_missing_for_cuda(num_ranks, ask())) else "cuda"
    if found == "cuda" and device != "gpu":
        raise OptionError(f"--ops cuda needs --device gpu, but the device is {device}; use --ops auto")
    if allows_variant and found not in ("fused", "cuda"):
        raise OptionError(f"--allow-variant-ops applies to fused ops, but the ops are {found}; add --ops fused, or remove it")
    return found


def _ops(asked: str, device: str) -> str:
    if asked == "native" and device != "cpu":
        raise OptionError(f"--ops native needs --device cpu, but the device is {device}; use --ops auto")
    if asked == "auto" and device != "gpu":
        return "native" if device == "cpu" else "fused"
    return asked


def resolve_plan(asked: str, ops: str, device: str) -> str:
    """Return how the table `ops` runs: op by op, as a tape of native ops, or as graphs of the device."""
    if ops != "native" and (asked == "tape" or (asked == "captured" and device == "cpu")):
        raise OptionError(
            f"--plan {asked}: on --device {device} only native ops can be recorded, but the ops are {ops}; use --plan auto"
        )
    if asked == "auto":
        return {"native": "tape", "cuda": "captured"}.get(ops, "eager")
    return asked


def has_distribution(name: str) -> bool:
    import importlib.metadata  # slow to import, and not needed with native ops

    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
