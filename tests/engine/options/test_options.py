"""Options: their three sources, messages for invalid ones, and the resulting configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import OptionError
from engine.keys import key_digest
from engine.options.other_hosts import FLAGS, OTHER_HOSTS
from engine.options.read import make_parser, read_options
from engine.options.resolve import MAX_DEFAULT_CACHE_BYTES, resolve
from engine.options.resolve_device import installed_paddle
from engine.options.resolve_ranks import available_cores
from engine.options.table import GROUPS, OPTIONS, Option
from engine.process.topology import default_plan
from shm.rank_group import buffers_at
from tests.engine.echo_engine import REPOSITORY
from tools.demo import MODEL, MODELS, VISION_MODEL

NINES = "9" * 400
ODD_TEXTS = (
    *(NINES, f"-{NINES}", "9" * 5000, f"{NINES}G", f"secret={NINES}", "-1", "0", str(1 << 53), str((1 << 64) - 1)),
    *("nan", "inf", "-inf", "1e999", "0.0001", "\u0663", "\u00b2", "", " ", "\n", ",", "=", "[", "a..b"),
    *("x" * 300, "/" + "x" * 300, "x/" * 3000, "x" * 100_000, "~nobody-here", "~nobody-here/x", "/dev/null/x"),
    *("a\0b", "/\0", "\udcff", "/\udcff", "{{\udcff", "{{\0", "\ufeff"),
)
ask_once = cache(installed_paddle)  # in a process that loads it, which takes seconds
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
TOKEN_NUMBERS = LAYERS * 2 * KV_HEADS * HEAD_DIM  # keys and values
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
PROCESSORS = {"float32": frozenset({"avx2"}), "bfloat16": frozenset({"avx2", "avx512_bf16"})}  # by what `--dtype auto` chooses


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without weights: options read only its config."""
    directory = tmp_path / "small-model"
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(params=PROCESSORS)
def dtype(request: pytest.FixtureRequest) -> str:
    """Return the dtype that `auto` gives on a processor of each kind."""
    name: str = request.param
    return name


def configure(
    model: Path, *arguments: str, environment: dict[str, str] | None = None, processor: str = "float32"
) -> EngineConfig:
    return resolve(read_options([str(model), *arguments], environment or {}), PROCESSORS[processor])[0]


def test_defaults(model: Path, dtype: str) -> None:
    config = configure(model, processor=dtype)
    assert config.model == str(model)
    assert config.served_model_name == ("small-model", str(model))
    assert (config.load_format, config.max_model_len, config.device) == ("safetensors", 1024, "cpu")
    assert (config.dtype, config.kv_cache_dtype, config.quantization) == (dtype, dtype, "none")
    assert config.num_kv_blocks == 32 * 1024 // 16  # a full batch of the longest samples
    assert config.kv_cache_bytes == (config.num_kv_blocks + 1) * 16 * TOKEN_NUMBERS * DTYPE_BYTES[dtype]
    assert config.threads >= 1
    assert (config.ops, config.plan) == ("native", "tape")
    assert configure(model, "--ops", "reference").plan == "eager"
    assert Path(config.run_dir).name == config.run_id
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


OF_A_ROUTER = {
    "allow_mixed_kernels",
    "drain_timeout",
    "engines",
    "max_engines",
    "namespace",
    "namespace_facts",
    "namespace_without_kernels",
    "peer_silence",
    "peer_timeout",
}


def test_every_engine_option_is_on_the_command_line() -> None:
    """Everything in EngineConfig that is not derived can be set, and every option ends up there."""
    worked_out = {
        "adapter_bytes",
        "adapter_expert_bytes",
        "calibration_digest",
        "comm_bytes",
        "device_arena_library",
        *OF_A_ROUTER,
        "encoder_attention_cost",
        "encoder_depth",
        "encoder_passes",
        "encoder_row_width",
        "encoder_whole_layers",
        "group_ports",
        "is_cache_estimated",
        "kv_cache_bytes",
        "kv_groups",
        "memory_nodes",
        "num_states",
        "pooling",
        "run_id",
        "shows_tools",
        "state_bytes",
    }
    fields = {
        field.removesuffix("_s").removesuffix("_ms") if field not in OPTIONS else field
        for field in EngineConfig.__struct_fields__
    } - worked_out
    ways_to_others = {
        *("bind_memory_nodes", "demo", "end_with", "gpu_memory_utilization", "kv_cache_memory", "pipeline_parallel_size"),
        *("pooler_config", "runner", "weight_cache", "revision", "tokenizer", "tokenizer_revision"),
        *("generation_config", "override_generation_config", "enable_lora", "ignore_config_keys", "check_memory", "hub"),
        "state_cache_memory",
    }
    assert set(OPTIONS) - ways_to_others == fields


def test_the_embedded_model_is_the_default() -> None:
    assert MODEL == REPOSITORY / "tools" / "demo" / "model"
    assert resolve(read_options([], {}, MODELS))[0].served_model_name == ("tokamak-demo",)
    assert Path(resolve(read_options([], {}, MODELS))[0].model) == MODEL
    with pytest.raises(OptionError, match="--model: no model is given"):
        resolve(read_options([], {}))[0]


def test_the_embedded_model_that_sees() -> None:
    config = resolve(read_options(["--demo", "vision"], {}, MODELS))[0]
    assert (Path(config.model), config.served_model_name) == (VISION_MODEL, ("tokamak-demo-vision",))
    with pytest.raises(OptionError, match="--demo text and --model somewhere choose different models; remove one of them"):
        resolve(read_options(["somewhere", "--demo", "text"], {}, MODELS))


def test_command_line_wins_over_environment_over_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("port: 1\nmax-num-seqs: 7\nmax_waiting: 9\nno-enable-prefix-caching: true\napi-key: [a, b]\nseed: null\n")
    environment = {"TOKAMAK_PORT": "2222", "TOKAMAK_MAX_NUM_SEQS": "8", "OTHER": "x"}
    config = configure(model, "--port", "3333", "--config", str(path), environment=environment)
    assert (config.port, config.max_num_seqs, config.max_waiting) == (3333, 8, 9)
    assert config.enable_prefix_caching is False
    assert config.api_key == (key_digest("a"), key_digest("b"))
    path.write_text(json.dumps({"port": 1111, "kv-cache-memory": "1MiB"}))
    assert configure(model, environment={"TOKAMAK_CONFIG": str(path)}).port == 1111


@pytest.mark.parametrize("name", ["/no/such/path", "./nosuch", "~nobody/x", "/etc/passwd", "/etc"])
def test_wrong_model_path_is_named_once(name: str) -> None:
    with pytest.raises(OptionError) as refused:
        resolve(read_options(["--model", name], {}, MODELS))
    assert str(refused.value).startswith("--model ")
    assert str(refused.value).count(name) == 1


def test_configuration_holds_no_key(model: Path) -> None:
    keys = ("--api-key", "first-secret", "--api-key-priority", "first-secret=3", "--admin-key", "second-secret")
    assert b"-secret" not in msgspec.json.encode(configure(model, *keys))
    assert configure(model).admin_key == ""


def test_names_keys_and_flags(model: Path) -> None:
    config = configure(model, "--served-model-name", "a", "--served-model-name", "b,c", "--no-enable-prefix-caching")
    assert config.served_model_name == ("a", "b", "c")
    assert not config.enable_prefix_caching
    environment = {"TOKAMAK_API_KEY": "x,y=", "TOKAMAK_API_KEY_PRIORITY": "y==-3", "TOKAMAK_ENABLE_PREFIX_CACHING": "off"}
    config = configure(model, environment=environment)
    assert config.api_key == (key_digest("x"), key_digest("y="))
    assert config.api_key_priority == ((key_digest("y="), -3),)
    assert not config.enable_prefix_caching


def test_unknown_variable_is_noted_with_the_nearest_name(model: Path) -> None:
    options = read_options([str(model)], {"TOKAMAK_PROT": "1", "TOKAMAK_URL": "http://x"})
    assert options.notes == ["ignored environment variable TOKAMAK_PROT: unknown option; did you mean TOKAMAK_PORT?"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "--port 99999: expected 0 to 65535"),
        (["--port", "http"], "--port http: expected an integer"),
        (["--block-size", "17"], "--block-size 17: expected a power of two, such as 16 or 32"),
        (["--dtype", "float13"], "--dtype float13: expected one of auto, float32, bfloat16"),
        (["--max-model-len", "1000000"], "the limit of the model, max_position_embeddings 1024"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory lots: expected a size such as 2GiB"),
        (["--kv-cache-memory", "100"], "use at least"),
        (["--kv-cache-memory", "9" * 400], "... (400 letters): expected 1 to 9007199254740992"),
        (["--num-kv-blocks", "1"], "--num-kv-blocks 1: expected at least 2"),
        (["--num-kv-blocks", "99999999999999999"], "--num-kv-blocks 99999999999999999: expected 2 to 9007199254740992"),
        (["--run-dir", "~nobody-here/x"], "--run-dir ~nobody-here/x: expected a path; its user does not exist on this machine"),
        (["--chat-template", "~nobody-here/x"], "--chat-template ~nobody-here/x"),
        (["--hang-timeout", "nan"], "--hang-timeout nan: expected a number of seconds"),
        (["--stop-timeout", "0"], "expected 0.1 to 1e+07"),
        (["--threads", "0"], "--threads 0: expected 1 to 1024"),
        (["--ops", "reference", "--plan", "tape"], "--plan tape: on --device cpu only native ops can be recorded"),
        (["--api-key", "a,,b"], "--api-key"),
        (["--api-key", "a", "--api-key-priority", "a"], "expected KEY=PRIORITY, such as secret=10"),
        (["--api-key", "a", "--api-key-priority", "a=high"], "expected an integer"),
        (
            ["--api-key", "a", "--api-key-priority", "b=1"],
            "--api-key-priority: key 1, with priority 1, is not one of the 1 keys in --api-key",
        ),
        (["--api-key", "a", "--api-key-priority", "a=1,a=2"], "--api-key-priority: a key is given twice"),
        (["--model", "/other"], "two models are given"),
        (["--chat-template", "/no/such/file"], "--chat-template /no/such/file"),
        (["--config", "/no/such/file"], "--config /no/such/file: No such file"),
        (["--device", "xpu"], "pip install 'tokamak-serve[xpu]'"),
    ],
)
def test_wrong_values_are_named_with_a_remedy(model: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(OptionError) as error:
        configure(model, *arguments)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot: 1", "unknown option prot; did you mean port?"),
        ("port: [1, 2]", "expected a single value"),
        ("port: {a: 1}", "expected a single value"),
        ("- port", "contains a list"),
        ("port: 1.5", "port 1.5: expected an integer"),
        ("a: b: c", "is not valid YAML or JSON"),
        ("enable-prefix-caching: perhaps", "expected true or false"),
        ("port: " + "9" * 5000, "is not valid YAML or JSON"),
        ("port: 0x" + "f" * 5000, "port with thousands of digits"),
        ("port: {a: 0x" + "f" * 5000 + "}", "expected a single value"),
        ("port: !!timestamp x", "is not valid YAML or JSON"),
        ("port: " + "[" * 500, "is not valid YAML or JSON"),
        ("host: " + "x" * 5000, "... (5000 letters): expected an address or a host name"),
    ],
)
def test_wrong_files(model: Path, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(content)
    with pytest.raises(OptionError) as error:
        configure(model, "--config", str(path))
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_wrong_variables_are_named(model: Path) -> None:
    with pytest.raises(OptionError, match="TOKAMAK_PORT x: expected an integer"):
        configure(model, environment={"TOKAMAK_PORT": "x"})


@pytest.mark.parametrize(
    ("size", "num_bytes"), [("2GiB", 2 << 30), ("1.5M", 3 << 19), ("64k", 64 << 10), ("123456", 123456), ("1 gb", 1 << 30)]
)
def test_sizes(size: str, num_bytes: int) -> None:
    assert OPTIONS["kv_cache_memory"].kind.parse(size) == num_bytes


def test_kv_blocks(model: Path, dtype: str) -> None:
    block_bytes = 16 * TOKEN_NUMBERS * DTYPE_BYTES[dtype]
    config = configure(model, "--kv-cache-memory", str(101 * block_bytes + 5), processor=dtype)
    assert (config.num_kv_blocks, config.kv_cache_bytes) == (100, 101 * block_bytes)
    config = configure(model, "--kv-cache-memory", "1GiB", "--num-kv-blocks", "70")
    assert (config.num_kv_blocks, config.max_model_len) == (70, 1024)
    config = configure(model, "--max-num-seqs", "4096", "--block-size", "1024")
    assert config.kv_cache_bytes <= MAX_DEFAULT_CACHE_BYTES
    # what drafters remember is taken from what the cache would have, and from nothing that was asked for
    drafts = "--speculative-config", '{"method": "ngram,suffix"}'
    fewer = configure(model, "--max-num-seqs", "4096", "--block-size", "1024", *drafts)
    at_once, of_token = fewer.speculative_config.index_bytes
    taken = at_once + of_token * (fewer.num_kv_blocks + 1) * 1024
    assert fewer.num_kv_blocks < config.num_kv_blocks
    assert fewer.kv_cache_bytes + taken <= MAX_DEFAULT_CACHE_BYTES
    assert configure(model, "--num-kv-blocks", "70", *drafts).num_kv_blocks == 70


def test_kv_cache_dtype(model: Path) -> None:
    """The same memory holds more blocks of a narrower type; int8 has a scale of 4 bytes for each position and head."""
    config = configure(model, "--dtype", "float32")
    assert config.kv_cache_dtype == "float32"
    memory = config.kv_cache_bytes
    for dtype, head_bytes in (("bfloat16", 2 * 8), ("int8", 8 + 4)):
        config = configure(model, "--kv-cache-dtype", dtype, "--kv-cache-memory", str(memory))
        assert config.kv_cache_dtype == dtype
        assert config.num_kv_blocks == memory // (LAYERS * 2 * 16 * KV_HEADS * head_bytes) - 1
        assert config.kv_cache_bytes <= memory
    assert configure(model, "--dtype", "bfloat16").kv_cache_dtype == "bfloat16"
    assert configure(model, "--dtype", "float32", "--quantization", "wint8").kv_cache_dtype == "bfloat16"
    assert configure(model, "--dtype", "bfloat16", "--kv-cache-dtype", "float32").kv_cache_dtype == "float32"
    assert configure(model, "--ops", "reference").kv_cache_dtype == "float32"
    with pytest.raises(
        OptionError, match=r"int8 needs native ops .*, but the ops are reference, .*use --kv-cache-dtype float32"
    ):
        configure(model, "--ops", "reference", "--kv-cache-dtype", "int8")


def test_odd_heads_need_a_float32_cache(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {
        "architectures": ["Phi3ForCausalLM"],
        "head_dim": 9,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.9},
    }
    (model / "config.json").write_text(json.dumps(config))
    assert configure(model, "--dtype", "bfloat16").kv_cache_dtype == "float32"
    for dtype in ("bfloat16", "int8"):
        with pytest.raises(OptionError, match=f"--kv-cache-dtype {dtype} needs heads with an even .* head_dim is 9; use"):
            configure(model, "--kv-cache-dtype", dtype)


def test_model_limit_is_lowered_to_the_cache_size(model: Path) -> None:
    options = read_options([str(model), "--num-kv-blocks", "10"], {})
    assert resolve(options)[0].max_model_len == 160
    assert "10 KV blocks hold 160 tokens, but the limit 1024 of the model needs 64 blocks" in options.notes[0]


def test_a_limit_that_was_asked_for_stays(model: Path) -> None:
    options = read_options([str(model), "--num-kv-blocks", "10", "--max-model-len", "200"], {})
    assert resolve(options)[0].max_model_len == 200
    assert "10 KV blocks hold 160 tokens, but --max-model-len 200 needs 13 blocks" in options.notes[0]


def test_chat_templates(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}\n")
    assert configure(model, "--chat-template", str(path)).chat_template == "{{ messages }}\n"
    assert configure(model, "--chat-template", "{% for m in messages %}\n{% endfor %}").chat_template.startswith("{% for")


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_any_text_is_accepted_or_an_option_error(model: Path, option: Option) -> None:
    """No other kind of exception is raised, and accepted values can be written to the run's manifest."""
    variable = f"TOKAMAK_{option.key.upper()}"
    for text in ODD_TEXTS:
        if option.key == "model" and len(text) < 200 and "/" not in text:  # the hub might have it
            continue
        try:
            options = read_options([], {"TOKAMAK_MODEL": str(model), variable: text})
            config = resolve(options, ask_paddle=ask_once)[0]
        except OptionError as error:
            reason = str(error)
        else:
            reason = option.name
            assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
        assert option.name in reason.lower().replace("_", "-")


@pytest.mark.parametrize("name", ["/no/such/model", "not a name"])
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        resolve(read_options(["--model", name], {}))[0]


def test_a_model_that_cannot_be_read(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(OptionError, match="GPT2LMHeadModel is not supported"):
        configure(model)


def test_the_plan_follows_the_options(model: Path) -> None:
    names = [plan.name for plan in default_plan(configure(model, "--api-processes", "2", "--tokenizer-processes", "3"))]
    assert names == ["api0", "api1", "tokenizer0", "tokenizer1", "tokenizer2", "scheduler", "cache", "worker0"]


def test_help_shows_every_option_in_its_group() -> None:
    text = make_parser().format_help()
    for title, options in GROUPS.items():
        assert f"\n{title}:\n" in text
        assert all(f"--{option.name}" in text for option in options)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["serve", "--port", "x"], 2),
        (["serve", "--run-dir", "/" + "x" * 300], 2),
        (["serve", "--model", "x" * 300], 2),
        (["serve", "--prot"], 2),
        (["serve", "--nnodes", "2"], 2),
        (["nothing"], 2),
        ([], 2),
        (["--help"], 0),
    ],
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_replicas(model: Path) -> None:
    """Cores and cache memory are divided; limits are per replica."""
    cores = available_cores()
    two = configure(model, "-dp", "2", "--num-kv-blocks", "100")
    assert (two.data_parallel_size, two.tensor_parallel_size, two.num_ranks) == (2, 1, 2)
    assert (two.threads, two.num_kv_blocks) == (max(1, cores // 2), 100)
    assert configure(model).num_ranks == 1
    bound, _ = resolve(read_options([str(model), "--data-parallel-size", "2", "--bind-memory-nodes"], {}))
    assert sorted(core for node in bound.memory_nodes for core in node) == sorted(os.sched_getaffinity(0))
    assert two.memory_nodes == ()
    options = read_options([str(model), "--data-parallel-size", "64", "--threads", str(cores)], {})
    assert resolve(options)[0].threads == cores
    assert any(f"64 ranks of {cores} threads share {cores} cores" in note for note in options.notes)
    with pytest.raises(OptionError, match="--data-parallel-size 65"):
        configure(model, "--data-parallel-size", "65")
    with pytest.raises(OptionError, match="--data-parallel-routing random"):
        configure(model, "--data-parallel-routing", "random")


def test_tensor_ranks(model: Path) -> None:
    """Two KV heads: of four ranks, each still has one."""
    assert configure(model).comm_bytes == 0
    for size in (2, 4):
        config = configure(model, "-tp", str(size), "--max-num-batched-tokens", "48", "--max-num-seqs", "8")
        assert (config.tensor_parallel_size, config.num_ranks) == (size, size)
        widest = 4 * 48 * max(100, 64)  # logits of all rows, or activations
        assert config.comm_bytes == buffers_at(size) + 2 * widest
        assert [plan.name for plan in default_plan(config)][-size:] == [f"worker{rank}" for rank in range(size)]
        assert config.num_groups == 0
    assert configure(model, "-tp", "2", "-dp", "3", "--ops", "reference").num_groups == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-tp", "3"), "3 does not divide the 4 attention heads of the model; use one of [1, 2, 4]"),
        (("-tp", "4", "-dp", "32"), "4 times --data-parallel-size 32 is 128 ranks, but the limit is 64"),
        (("--pipeline-parallel-size", "2"), "2: pipeline parallelism is not supported, only 1; use --tensor-parallel-size"),
    ],
)
def test_indivisible_layouts_are_refused(model: Path, arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(OptionError) as error:
        configure(model, *arguments)
    assert text in str(error.value)


@pytest.mark.parametrize("key", OTHER_HOSTS)
def test_options_for_several_hosts_are_refused(model: Path, key: str, tmp_path: Path) -> None:
    """The error has the given value and an alternative, whatever its source."""
    name = key.replace("_", "-")
    path = tmp_path / "options.yaml"
    path.write_text(f"{name}: '7'\n")
    value = () if key in FLAGS else ("7",)
    sources = {
        " ".join((f"--{name}", *value)): ((f"--{name}", *value), {}),
        f"TOKAMAK_{key.upper()} 7": ((), {f"TOKAMAK_{key.upper()}": "7"}),
        f"{path}: {name} 7": (("--config", str(path)), {}),
    }
    for source, (arguments, environment) in sources.items():
        with pytest.raises(OptionError) as error:
            configure(model, *arguments, environment=environment)
        assert str(error.value).startswith(f"{source}: ")
        assert any(text in str(error.value) for text in ("start one engine per host", "--data-parallel-size", "remove it"))


def test_only_one_host_is_supported(model: Path) -> None:
    configure(model, "--nnodes", "1", "--node-rank", "0")
    with pytest.raises(OptionError, match=r"^--headless: an engine runs on 1 host; start one engine per host"):
        configure(model, "--headless")


def test_ranks_and_kv_heads_must_divide_each_other(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8})
    )
    assert configure(model, "-tp", "3").tensor_parallel_size == 3
    with pytest.raises(OptionError) as error:
        configure(model, "-tp", "4")
    assert "4 is neither a divisor nor a multiple of the 6 KV heads of the model; use one of [1, 2, 3, 6, 12]" in str(
        error.value
    )


def give_experts(model: Path) -> None:
    """Give the checkpoint 8 experts with 2 chosen per row."""
    config = json.loads((model / "config.json").read_text())
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "hidden_act": "silu"}
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, **experts}
    (model / "config.json").write_text(json.dumps(config))


def test_ranks_that_share_experts(model: Path) -> None:
    """Ranks share one arena, which grows with the ranks and with the rows of a step."""
    give_experts(model)
    two, three, six, longer = (
        configure(model, "--enable-expert-parallel", *arguments).comm_bytes
        for arguments in (
            ("-dp", "2"),
            ("-dp", "3"),
            ("-dp", "3", "-tp", "2"),
            ("-dp", "3", "--max-num-batched-tokens", "4096"),
        )
    )
    assert two < three < min(six, longer)
    config = configure(model, "--enable-expert-parallel", "-dp", "2", "--enable-eplb", "--eplb-config", '{"min_gain": 0.5}')
    assert (config.enable_eplb, config.eplb_config.min_gain, config.expert_placement_strategy) == (True, 0.5, "linear")


def test_the_intake_of_ranks_that_share_experts(model: Path) -> None:
    """The resident part of the windows holds a decode step, unless more is asked for."""
    give_experts(model)
    options = ("--enable-expert-parallel", "-dp", "2", "--max-num-seqs", "24")
    config = configure(model, *options)
    assert (config.ep_batched_token_timeout_ms, config.ep_mixed_steps) == (100, True)
    config = configure(model, *options, "--ep-batched-token-timeout-ms", "0", "--no-ep-mixed-steps")
    assert (config.ep_batched_token_timeout_ms, config.ep_mixed_steps) == (0, False)


def test_dispatch_tokens_default_to_a_decode_step(model: Path) -> None:
    """An explicit value wins over the default."""
    give_experts(model)
    options = ("--enable-expert-parallel", "-dp", "2", "--max-num-seqs", "24")
    limit = "--num-max-dispatch-tokens-per-rank"
    assert configure(model, *options).num_max_dispatch_tokens_per_rank == 24
    assert configure(model, *options, limit, "100").num_max_dispatch_tokens_per_rank == 100
    assert configure(model, *options, "-tp", "2", limit, "12").num_max_dispatch_tokens_per_rank == 12
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')
    assert configure(model, *options, *drafts).num_max_dispatch_tokens_per_rank == 24 * (1 + 5)
    assert configure(model, *options, *drafts, limit, "200").num_max_dispatch_tokens_per_rank == 200


DISPATCH = ("--num-max-dispatch-tokens-per-rank",)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--enable-expert-parallel", "-dp", "2", "--num-max-dispatch-tokens-per-rank", "31"),
            "per-rank 31 is too small: a decode step has up to 32 rows (--max-num-seqs), 32 for each of 1 ranks; raise it",
        ),
        (
            ("--enable-expert-parallel", "-tp", "2", "--num-max-dispatch-tokens-per-rank", "15"),
            "16 for each of 2 ranks; raise it to at least 16",
        ),
        (
            ("--enable-expert-parallel", "-tp", "2", "--speculative-config", '{"method": "suffix"}', *DISPATCH, "100"),
            "up to 544 rows (--max-num-seqs with 16 draft tokens each (--speculative-config)), 272 for each of 2 ranks",
        ),
        (
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8}', "--max-num-batched-tokens", "8"),
            "(1 and num_speculative_tokens 8), more than --max-num-batched-tokens 8; raise that to at least 9",
        ),
        (("-dp", "2", "--no-ep-mixed-steps"), "--no-ep-mixed-steps needs expert parallelism; add --enable-expert-parallel"),
        (("--ep-batched-token-timeout-ms", "100"), "--ep-batched-token-timeout-ms needs expert parallelism"),
        (("--ep-batched-token-timeout-ms", "-1"), "--ep-batched-token-timeout-ms -1: expected 0 to 3600000"),
        (("--enable-expert-parallel",), "needs at least 2 ranks, but there is 1 rank"),
        (("-dp", "2", "--enable-eplb"), "add --enable-expert-parallel"),
        (
            ("--enable-expert-parallel", "-dp", "2", "--enable-eplb", "--eplb-config", '{"num_redundant_experts": 9}'),
            "num_redundant_experts 9 is too large: 8 experts on 2 ranks have at most 8 redundant copies",
        ),
        (("--eplb-config", '{"communicator": "x"}'), 'communicator "x": experts move without communication'),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(model: Path, arguments: tuple[str, ...], text: str) -> None:
    give_experts(model)
    with pytest.raises(OptionError) as error:
        configure(model, *arguments)
    assert text in str(error.value)


def test_a_model_without_experts_shares_none(model: Path) -> None:
    with pytest.raises(OptionError) as error:
        configure(model, "--enable-expert-parallel", "-dp", "2")
    assert "has no experts" in str(error.value)


def test_unknown_config_keys_are_refused_unless_ignored(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clip_qkv": 8.0, "logit_scale": 0.5}))
    with pytest.raises(OptionError, match=r"not supported for llama .*: clip_qkv 8.0, logit_scale 0.5; --ignore-config-keys"):
        configure(model)
    configure(model, "--ignore-config-keys", "clip_qkv,logit_scale")
