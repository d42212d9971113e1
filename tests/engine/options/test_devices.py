"""Requested devices: the Paddle that they need, and no feature silently disabled."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import OptionError
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.options.resolve_device import LEAST_CAPABILITY, InstalledPaddle
from ops.cuda.compiler import OLDEST
from tests.paths import GOLDEN
from tools.demo import MODEL, VISION_MODEL

CPU_WHEEL = InstalledPaddle("3.3.1", {})
NEW_CARDS = InstalledPaddle("", {}, "none", {"gpu": 80 << 30}, (("A100", (8, 0)),) * 2)
WITH_CARDS = InstalledPaddle("3.3.1", {"gpu": 2, "xpu": 8, "npu": 1})


def configure(*arguments: str, paddle: InstalledPaddle = WITH_CARDS, model: Path = MODEL) -> EngineConfig:
    options = read_options([str(model), "--num-kv-blocks", "64", *arguments], {})
    return resolve(options, ask_paddle=lambda: paddle)[0]


@pytest.mark.parametrize(
    ("arguments", "paddle", "said"),
    [
        (
            ["--device", "gpu", "--ops", "fused"],
            CPU_WHEEL,
            "is not supported by the installed Paddle 3.3.1 with cpu; run pip install 'tokamak-serve[gpu]' --extra-index-url "
            "https://www.paddlepaddle.org.cn/packages/stable/cu126/ (paddlepaddle-gpu) or TOKAMAK_EXTRA=gpu tools/serve",
        ),
        (["--device", "xpu"], CPU_WHEEL, "https://www.paddlepaddle.org.cn/packages/stable/xpu-p800/ (paddlepaddle-xpu)"),
        (["--device", "qpu"], WITH_CARDS, "with cpu, gpu (2 cards), npu (1 cards), xpu (8 cards); install the plugin"),
        (
            ["--device", "gpu", "--ops", "fused"],
            InstalledPaddle("", {}, "no libx"),
            "cannot be loaded (no libx); run pip",
        ),
        (
            ["--device", "gpu", "-dp", "3"],
            WITH_CARDS,
            "3 ranks (--tensor-parallel-size times --data-parallel-size) need one device each",
        ),
        (["--device", "gpu", "--ops", "fused", "-dp", "3"], WITH_CARDS, "Paddle 3.3.1 finds 2; use at most 2"),
        (["--device", "gpu", "-dp", "3"], NEW_CARDS, "but the driver finds 2; use at most 2, or make more devices visible"),
        (["--device", "xpu", "--plan", "tape"], WITH_CARDS, "--plan tape: on --device xpu only native ops can be recorded"),
        (["--ops", "reference", "--plan", "captured"], WITH_CARDS, "--plan captured: on --device cpu only native ops"),
        (["--device", "npu", "--ops", "native"], WITH_CARDS, "--ops native needs --device cpu"),
        (["--device", "gpu", "--ops", "reference", "--allow-variant-ops"], WITH_CARDS, "the ops are reference; add --ops"),
        (
            ["--device", "xpu", "--ops", "cuda"],
            WITH_CARDS,
            "--ops cuda needs --device gpu, but the device is xpu; use",
        ),
        (
            ["--device", "gpu", "--ops", "cuda", "-dp", "3"],
            WITH_CARDS,
            "3 ranks (--tensor-parallel-size times --data-parallel-size) need one device each",
        ),
        *(
            (
                ["--device", device, "--enable-lora"],
                WITH_CARDS,
                f"the device is {device} and the ops are fused; remove it, or",
            )
            for device in ("gpu", "xpu", "npu")
        ),
        (["--device", "gpu", "--quantization", "wint8"], WITH_CARDS, "--quantization wint8 needs native ops"),
        (
            ["--device", "gpu", "--kv-cache-dtype", "int8"],
            WITH_CARDS,
            "--kv-cache-dtype int8 needs native ops (--ops cuda on GPUs)",
        ),
    ],
)
def test_unsupported_device_error_has_a_remedy(arguments: list[str], paddle: InstalledPaddle, said: str) -> None:
    with pytest.raises(OptionError) as error:
        configure(*arguments, paddle=paddle)
    assert said in str(error.value)


OLD_CARD = ("Tesla T4", (7, 5))


@pytest.mark.parametrize(
    ("paddle", "arguments", "num_missing"),
    [
        (InstalledPaddle("3.3.1", {"gpu": 0}, driver_error="no driver"), (), 1),
        (InstalledPaddle("", {}, driver_error="cuInit: CUDA_ERROR_NO_DEVICE"), (), 1),
        (InstalledPaddle("3.3.1", {"gpu": 1}, gpus=(OLD_CARD,)), ("--ops", "cuda"), 1),
        (InstalledPaddle("3.3.1", {"gpu": 2}, gpus=(("A100", (8, 0)), OLD_CARD)), ("-dp", "2", "--ops", "cuda"), 1),
        (InstalledPaddle("3.3.1", {}, memory={"gpu": 8 << 20}, gpus=(OLD_CARD,)), (), 2),
        (InstalledPaddle("", {}, gpus=(("A100", (8, 0)),), compiler_error="NVRTC was not found"), (), 1),
    ],
)
def test_one_message_says_what_a_gpu_lacks(paddle: InstalledPaddle, arguments: tuple[str, ...], num_missing: int) -> None:
    with pytest.raises(OptionError) as error:
        resolve(read_options([str(MODEL), "--device", "gpu", *arguments], {}), ask_paddle=lambda: paddle)
    said = str(error.value)
    assert said.count("Also missing: ") == num_missing - 1
    for part, is_said in {
        f"needs NVIDIA's driver: {paddle.driver_error}; install it": bool(paddle.driver_error),
        "(Tesla T4) has compute capability 7.5, but at least 8.0 is needed": OLD_CARD in paddle.gpus,
        f"compiles its kernels, but cannot: {paddle.compiler_error}": bool(paddle.compiler_error),
        "of 8 MiB GPU memory leaves no room for a KV cache: weights ": bool(paddle.memory),
    }.items():
        assert (part in said) == is_said, part


def test_cards_that_are_not_used_may_be_old() -> None:
    cards = InstalledPaddle("3.3.1", {"gpu": 2}, gpus=(("A100", (8, 0)), OLD_CARD))
    assert configure("--device", "gpu", paddle=cards).ops == "cuda"
    assert configure("--device", "gpu", "-dp", "2", "--ops", "fused", paddle=cards).ops == "fused"
    assert LEAST_CAPABILITY == OLDEST


def test_cudas_kernels_take_rounded_weights_on_several_ranks() -> None:
    cuda = ("--device", "gpu", "--ops", "cuda")
    found = configure(*cuda, "--quantization", "wint4", "--allow-variant-ops", "-tp", "2", paddle=NEW_CARDS)
    assert (found.quantization, found.kv_cache_dtype) == ("wint4", "bfloat16")
    assert (found.allow_variant_ops, found.num_ranks) == (True, 2)


def test_cards_are_used_without_paddle() -> None:
    found = configure("--device", "gpu", paddle=NEW_CARDS)
    assert (found.ops, found.dtype, found.plan, found.kv_cache_dtype) == ("cuda", "bfloat16", "captured", "bfloat16")
    assert configure("--device", "gpu", "--dtype", "float32", paddle=NEW_CARDS).dtype == "float32"
    with_adapters = configure("--device", "gpu", "--enable-lora", paddle=NEW_CARDS)
    assert with_adapters.max_loras > 0


def test_replicas_share_experts_on_cards() -> None:
    """Each has its own processes: no group of Paddle's ends with one of them."""
    found = configure("--device", "gpu", "-dp", "2", "--enable-expert-parallel", paddle=NEW_CARDS, model=GOLDEN / "qwen3_moe")
    assert (found.ops, found.are_rank_groups_whole, found.num_groups) == ("cuda", False, 0)


@pytest.mark.parametrize("device", ["gpu", "xpu", "npu"])
@pytest.mark.parametrize("model", [MODEL, VISION_MODEL])
def test_no_device_switches_a_feature_off(device: str, model: Path) -> None:
    """Prefix caching, chunked media and all other features are those of the same ops on the CPU, also with a vision model."""
    found = {"run_id": "", "run_dir": "", "device": "", "device_arena_library": ""}
    plain = configure("--ops", "fused", model=model)
    other = configure("--device", device, model=model)
    assert other.device == device
    assert msgspec.structs.replace(other, **found) == msgspec.structs.replace(plain, **found)
    assert plain.enable_prefix_caching


def test_captured_plan_uses_graphs_on_a_device() -> None:
    config = configure("--device", "gpu", "--plan", "captured", "--max-num-seqs", "4")
    assert (config.plan, config.cudagraph_capture_sizes) == ("captured", (4, 2, 1))
