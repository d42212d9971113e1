"""Command lines of `vllm serve`: their effect here, notes, and refusals with the reason."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.sampling_defaults import SamplingDefaults
from engine.config import SpeculativeConfig
from engine.errors import OptionError
from engine.options.other_hosts import OTHER_HOSTS
from engine.options.read import read_options
from engine.options.resolve import resolve
from engine.options.router import ROUTER_OPTIONS, read_router_options
from engine.options.table import OPTIONS, OptionValues
from engine.options.vllm import LONG, table
from engine.options.vllm_flags import VALUES, VLLM_FLAGS
from engine.options.vllm_router_flags import ROUTER_FLAGS
from tests.paths import GOLDEN

MODEL = GOLDEN / "qwen3"


@pytest.mark.parametrize("key", VALUES)
def test_own_values_are_not_replaced(key: str) -> None:
    """A value that an option has itself never becomes another one of vLLM's."""
    own = OPTIONS[key].kind.metavar.strip("{}").split(",")
    assert not set(own) & set(VALUES[key])
    for value in own:
        assert read_options([f"--{key.replace('_', '-')}", value], {}).values[key] == value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--max_model_len 32k", {"max_model_len": 32_000}),
        ("--max-model-len=32K", {"max_model_len": 32_768}),
        ("--max-model-len 1.5k", {"max_model_len": 1500}),
        ("--max-model-len auto", {"max_model_len": 0}),
        ("--max-model-len -1", {"max_model_len": 0}),
        ("-tp 2 --data_parallel_size=3 -pp 1", {"tensor_parallel_size": 2, "data_parallel_size": 3}),
        ("--api-server-count 4", {"api_processes": 4}),
        ("-asc 4", {"api_processes": 4}),
        ("--dtype half", {"dtype": "bfloat16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("--quantization awq", {"quantization": "none"}),
        ("-q fp8", {"quantization": "none"}),
        ("--kv-cache-memory-bytes 1GiB", {"kv_cache_memory": 1 << 30}),
        ("--num-gpu-blocks-override 64", {"num_kv_blocks": 64}),
        ("--served-model-name a b --port 8001", {"served_model_name": ("a", "b"), "port": 8001}),
        ('--allowed-origins ["https://a.example","*"]', {"allowed_origins": ("https://a.example", "*")}),
        ("--uvicorn-log-level critical", {"log_level": "error"}),
        ("--enable-log-requests", {"log_requests": True}),
        ("--no-enable-log-requests", {"log_requests": False}),
        ("--metrics-prefix vllm --log-format json", {"metrics_prefix": "vllm", "log_format": "json"}),
        ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
        ("--max-num-batched-tokens 8k", {"max_num_batched_tokens": 8000}),
        (
            "--speculative-config.method ngram --speculative_config.num_speculative_tokens=5",
            {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=5)},
        ),
        ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": {"image": 2}}),
    ],
)
def test_effective_options(arguments: str, expected: dict[str, Any]) -> None:
    options = read_options(["owner/model", *arguments.split()], {})
    assert options.values["model"] == "owner/model"
    assert {key: options.values[key] for key in expected} == expected
    assert not any("has no effect" in note for note in options.notes)


def test_flags_of_older_versions_are_known() -> None:
    given = "m --enable-reasoning --guided-decoding-backend xgrammar --use-v2-block-manager --worker-use-ray"
    options = read_options(given.split(), {})
    assert options.values["model"] == "m"
    for flag in ("--enable-reasoning", "--guided-decoding-backend", "--use-v2-block-manager", "--worker-use-ray"):
        assert any(note.startswith(flag) and "has no effect: " in note for note in options.notes), flag


def test_ineffective_options_are_noted() -> None:
    given = "--trust-remote-code m --swap_space 4 --enforce-eager -O3 -O.mode=3 --enable-chunked-prefill"
    options = read_options(given.split(), {"TOKAMAK_SWAP_SPACE": "4"})
    assert options.values["model"] == "m"
    flags = ("--trust-remote-code", "--swap-space", "--enforce-eager", "--compilation-config", "--enable-chunked")
    for flag in (*flags, "TOKAMAK_SWAP_SPACE"):
        assert any(note.startswith(flag) and "has no effect: " in note for note in options.notes), flag
    assert "float16 is not supported" in read_options(["--dtype", "float16"], {}).notes[0]
    assert read_options(["--task", "embed"], {}).values["runner"] == "pooling"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--speculative-model x --num-speculative-tokens 5", "--speculative-config"),
        ("--rope-scaling {} --rope-theta 10000", "config.json"),
        ("--num-scheduler-steps 8", "remove it"),
        ("--download-dir /data", "HF_HOME"),
        ("--logits-processors a:b", "loading external code is not supported"),
        ("--cpu-offload-gb 4", "remove it"),
        ("--return-tokens-as-token-ids", "in requests"),
        ("--kv-transfer-config {}", "moving a KV cache between engines is not supported"),
        ("--max-model-len 1.00001k", "integer"),
        ("--max-model-len many", "32k"),
        ("--revision v2", "--revision v2: .* is a local path"),
        ("--tokenizer-revision v2", "--tokenizer"),
        ("--tokenizer /no/such/tokenizer", "not a directory"),
        ("--generation-config /no/such/directory", "expected auto, vllm or a directory"),
        ('--override-generation-config {"temperature":-1}', "temperature"),
    ],
)
def test_refusals_give_a_reason(arguments: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        resolve(read_options([str(MODEL), *arguments.split()], {}), frozenset())


@pytest.mark.parametrize(
    "arguments", ["--cpu-offload-gb 0", "--response-role assistant", "--tokenizer-mode auto", "--task generate"]
)
def test_values_that_equal_the_defaults(arguments: str) -> None:
    assert not read_options(arguments.split(), {}).notes


def test_a_file_may_have_them(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("model: m\nmax_model_len: 16k\nenforce-eager: true\napi-server-count: 2\nserved-model-name: [a, b]\n")
    options = read_options(["--config", str(path)], {})
    assert (options.values["max_model_len"], options.values["api_processes"]) == (16_000, 2)
    assert options.values["served_model_name"] == ("a", "b")
    assert len(options.notes) == 1


def test_typed_path_is_a_served_name() -> None:
    config, _ = resolve(read_options([f"{MODEL}/"], {}), frozenset())
    assert config.served_model_name == ("qwen3", f"{MODEL}/")


def test_sampling_defaults_and_tokenizers_of_elsewhere(tmp_path: Path) -> None:
    def files(*arguments: str) -> dict[str, bytes]:
        return resolve(read_options([str(MODEL), *arguments], {}), frozenset())[1].files

    def defaults(*arguments: str) -> SamplingDefaults:
        return SamplingDefaults.decode(files(*arguments)["generation_config.json"])

    (tmp_path / "generation_config.json").write_text('{"top_k": 7, "temperature": 0.5}')
    assert defaults("--generation-config", "vllm") == SamplingDefaults()
    assert defaults("--generation-config", str(tmp_path)) == SamplingDefaults(top_k=7, temperature=0.5)
    over = ("--override-generation-config", json.dumps({"top_k": 9}))
    assert defaults("--generation-config", str(tmp_path), *over) == SamplingDefaults(top_k=9, temperature=0.5)
    (tmp_path / "tokenizer.json").write_text("{}")
    own, other = files(), files("--tokenizer", str(tmp_path))
    assert (other["tokenizer.json"], "tokenizer_config.json" in other, "tokenizer_config.json" in own) == (b"{}", False, True)
    assert other["generation_config.json"] == own["generation_config.json"]


def test_the_table_has_every_flag_once() -> None:
    shown = table(OPTIONS)
    for key in (*OPTIONS, *VLLM_FLAGS):
        assert shown.count(f"\n| `--{key.replace('_', '-')}` |") == 1, key
    assert not VLLM_FLAGS.keys() & (OPTIONS.keys() | OTHER_HOSTS.keys())
    assert all(fate.text in OPTIONS for fate in VLLM_FLAGS.values() if fate.effect == "alias")
    assert all(key in OPTIONS for key in ("max_model_len", "uds", "max_logprobs"))


FLAGS: dict[str, dict[str, bool]] = json.loads(Path(__file__).with_name("vllm_flags.json").read_text())


@pytest.mark.parametrize("version", FLAGS)
def test_every_flag_of_a_version_is_known(version: str) -> None:
    parts = {name.replace("-", "_") for name in LONG}
    known = OPTIONS.keys() | VLLM_FLAGS.keys() | OTHER_HOSTS.keys() | parts | {"config"}
    assert FLAGS[version].keys() - known == set()
    takes_none = {key for key, fate in VLLM_FLAGS.items() if fate.is_flag and fate.effect != "alias"}
    assert [key for key in FLAGS[version] if key in takes_none and not FLAGS[version][key]] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", FLAGS)
def test_no_flag_of_a_version_is_unrecognized(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    for key, takes_none in FLAGS[version].items():
        for name in (key, f"no-{key}") if takes_none else (key,):
            arguments = [f"--{name.replace('_', '-')}", *(() if takes_none else ("1",))]
            with contextlib.suppress(OptionError, SystemExit):
                read_options(["--model", "m", *arguments], {})
            assert "unknown option" not in capsys.readouterr().err, arguments


def router_options(arguments: str) -> OptionValues:
    return read_router_options(["--engines", "engines.txt", *arguments.split()], {})


def test_flags_of_the_router_are_known() -> None:
    given = "--policy power_of_two --request_timeout_secs 60 --cors-allowed-origins https://a.example https://b.example"
    options = router_options(f"{given} --retry-max-retries 3 --cb-failure-threshold 5 --prometheus-port 29000 --port 8001")
    assert (options.values["data_parallel_routing"], options.values["request_timeout"]) == ("load", 60)
    assert (options.values["allowed_origins"], options.values["port"]) == (("https://a.example", "https://b.example"), 8001)
    assert len(options.notes) == 4
    assert not ROUTER_FLAGS.keys() & (ROUTER_OPTIONS.keys() | OTHER_HOSTS.keys())
    assert all(fate.text in ROUTER_OPTIONS for fate in ROUTER_FLAGS.values() if fate.effect == "alias")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--worker-urls http://a:8000 http://b:8000", "--engines FILE"),
        ("--service-discovery --selector app=engine", "dns:NAME:PORT"),
        ("--policy best", "prefix, load, round-robin"),
        ("--vllm-pd-disaggregation --prefill http://a:8000 9000", "moving a KV cache"),
        ("--max-concurrent-requests 9", "--max-waiting"),
    ],
)
def test_refusals_of_the_router_give_a_reason(arguments: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        router_options(arguments)


@pytest.mark.parametrize("arguments", ["--headless", "--data-parallel-address 10.0.0.1"])
def test_other_hosts_are_reached_by_a_router(arguments: str) -> None:
    with pytest.raises(OptionError, match="`tokamak router` in front of them"):
        read_options(["m", *arguments.split()], {})


def test_parts_of_the_speculative_config_have_names() -> None:
    options = read_options(["--spec-method", "ngram", "--spec-tokens=3"], {})
    assert options.values["speculative_config"] == SpeculativeConfig(method="ngram", num_speculative_tokens=3)


def test_values_of_structured_outputs_are_no_model() -> None:
    options = read_options(["serve-this", "--structured-outputs-config.backend", "guidance"], {})
    assert options.values["model"] == "serve-this"
    assert "llguidance" in options.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--max-modle-len 5", "unknown option --max-modle-len; did you mean --max-model-len?"),
        ("--tensor_paralel_size=2", "unknown option --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        ("--frobnicate.x 3", "unknown option --frobnicate; run tokamak serve --help for a list of options"),
        ("a b", "unexpected argument 'b'"),
    ],
)
def test_mistyped_option_gets_the_nearest_name(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(arguments.split(), {})
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
