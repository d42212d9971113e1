"""Compares the bytes of answers across batches, chunks, caches, preemptions, drafts, kills and layouts, for the mechanisms that
the golden checkpoints lack: windows, caps, sinks, shared keys, MXFP4, recurrent states, and pictures of Gemma 4:

python -m tests.workers.variants.check_identity [--model NAME ...] [--precision NAME ...] [--layout NAME ...]

The reference is one rank that answers one request at a time, each prompt whole, with nothing cached. Other engines get all
requests at once, in small chunks and a small cache; again with what is cached; and again while each process behind the api is
killed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from engine.process.topology import role_of
from tests.e2e import protocols
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.kinds import COMPLETIONS, Call, Json, ask_all, every_kind
from tests.e2e.layouts import EPLB
from tests.e2e.precisions import PRECISIONS
from tests.e2e.test_chaos import Deltas, kill_in_turn, kill_together
from tests.e2e.workload import mixed_bodies
from tests.waiting import WATCHDOG_S, wait_until
from tests.workers.checkpoints import write_checkpoint
from tools.bench.pictures import picture

Config = dict[str, Any]
START, END, IMAGE, VIDEO, AUDIO = range(3, 8)
TEXT: Config = {
    **{"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2},
    **{"sliding_window": 40},
}
GPT_OSS: Config = {
    **TEXT,
    **{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 16, "num_local_experts": 6},
    **{"num_experts_per_tok": 2, "swiglu_limit": 3.0, "sliding_window": 24},
}
SEEING: Config = {
    **{"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None},
    **{"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, "boi_token_id": START, "eoi_token_id": END},
    "vision_config": {
        **{"model_type": "gemma4_vision", "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "head_dim": 12},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "patch_size": 6, "pooling_kernel_size": 2},
        "position_embedding_size": 600,
    },
}
RECURRENT: Config = {
    **{name: value for name, value in TEXT.items() if name != "sliding_window"},
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 32},
}
GEMMA4: Config = {**TEXT, "model_type": "gemma4_text", "global_head_dim": 24, "vocab_size_per_layer_input": 1024}
MODELS: dict[str, Config] = {
    "gemma2": {**TEXT, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 20},
    "mistral": {**TEXT, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "qwen3_5": {**RECURRENT, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3_next": {
        **{**RECURRENT, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_experts": 6},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    },
    "lfm2": {
        **{name: value for name, value in TEXT.items() if name not in ("sliding_window", "rms_norm_eps", "head_dim")},
        **{"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": False},
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "granitemoehybrid": {
        **{name: value for name, value in RECURRENT.items() if not name.startswith("linear_")},
        **{"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 6},
        **{"num_experts_per_tok": 2, "shared_intermediate_size": 64, "intermediate_size": 64, "residual_multiplier": 0.4},
        **{"mamba_n_heads": 8, "mamba_d_state": 32, "attention_multiplier": 0.2, "logits_scaling": 0.5},
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    },
    "gpt_oss": GPT_OSS,
    "gpt_oss-mxfp4": {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
    "gemma4": {  # as E2B: last layers share the keys of earlier ones
        **SEEING,
        "text_config": {
            **GEMMA4,
            **{
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 12,
                "use_double_wide_mlp": True,
            },
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding", "full")],
        },
    },
    "gemma4-experts": {  # as 26B-A4B: tokens of a picture see all of it
        **SEEING,
        "text_config": {
            **GEMMA4,
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 64},
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
            **{"use_bidirectional_attention": "vision", "layer_types": ["sliding_attention", "full_attention"] * 2},
        },
    },
}
DRAFTS = (
    "--speculative-config",
    '{"method": "ngram,suffix", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}',
)
CROWDED = ("--block-size", "4", "--num-kv-blocks", "150", "--max-num-seqs", "16")
RANKS = (*CROWDED, *DRAFTS, "--threads", "1")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (*CROWDED, "--max-num-batched-tokens", "16"),
    "one-drafts": (*CROWDED, *DRAFTS, "--max-num-batched-tokens", "40"),
    "tp2": (*RANKS, "-tp", "2", "--max-num-batched-tokens", "24"),
    "dp2": (*RANKS, "-dp", "2", "--max-num-batched-tokens", "100"),
    "dp2-ep": (*RANKS, "-dp", "2", *EPLB, "--max-num-batched-tokens", "56"),
}
OPTIONS = ("--max-model-len", "1200", "--restart-limit", "100", "--no-weight-cache", *protocols.OPTIONS)
PICTURE_TOKENS = 70
OF_PICTURES = ("--mm-processor-kwargs", f'{{"max_soft_tokens": {PICTURE_TOKENS}}}')
FEW_PICTURES = ("--encoder-cache-size", str(3 * PICTURE_TOKENS))
WHOLE_PICTURES = ("--max-num-batched-tokens", str(PICTURE_TOKENS + 10))  # a step takes the whole of one


def streams_and_wholes() -> list[Call]:
    """Return greedy and seeded requests, each as a stream and as a whole answer."""
    calls = []
    for body in mixed_bodies(16, seed=20, max_tokens=40):
        body["prompt"] = [max(token, AUDIO + 1) for token in body["prompt"]]  # no placeholders of pictures
        calls.append(Call(COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}}))
        calls.append(Call(COMPLETIONS, body | {"stream": False}))
    return calls


def about_pictures() -> list[Call]:
    """Return requests about pictures of several sizes, between texts of several lengths."""
    rng = random.Random(5)
    links = [
        "data:image/png;base64," + base64.b64encode(picture(40 + 16 * (number % 5), 40 + 24 * (number % 3), number)).decode()
        for number in range(12)
    ]
    calls = []
    for number, body in enumerate(mixed_bodies(10, seed=6, max_tokens=24)):
        text = [rng.randrange(40, 1000) for _ in range(1 + 7 * number)]
        found = [START, IMAGE, END]
        body |= {"prompt": [*text[:5], *found, *text[5:], *found, 50], "stream": number % 2 == 0}
        body["multi_modal_data"] = {"image": links[number : number + 2]}
        calls.append(Call(COMPLETIONS, body))
    return calls


def written(config: Config, place: Path) -> Path:
    place.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDEN / "qwen3" / name, place / name)
    write_checkpoint(place, config)
    return place


def ask(engine: EngineProcess, calls: list[Call]) -> list[Json]:
    """Ask for all at once."""
    return [protocols.without_usage(answer) for answer in asyncio.run(ask_all(engine.url, calls))]


def check_same(calls: list[Call], found: list[Json], expected: list[Json], condition: str) -> None:
    different = [index for index in range(len(calls)) if found[index] != expected[index]]
    if different:
        call, where = calls[different[0]], first_difference(found[different[0]], expected[different[0]])
        text = (
            f"{condition}: {len(different)} of {len(calls)} answers differ; the first, to {call.path} {str(call.body)[-400:]}"
        )
        raise AssertionError(f"{text}, at {where}")


def first_difference(found: Any, expected: Any, path: str = "") -> str:
    """Return path and values of the first place where two answers differ."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = [(key, found[key], expected[key]) for key in found]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(index, *both) for index, both in enumerate(zip(found, expected, strict=True))]
    else:
        return f"{path}: {str(found)[:200]}, expected {str(expected)[:200]}"
    key, *both = next(pair for pair in pairs if pair[1] != pair[2])
    return first_difference(*both, f"{path}/{key}")


def check_counts(engine: EngineProcess, layout: str) -> None:
    """Check that the conditions were there."""
    assert engine.metric("num_preemptions_total") > 0, "nothing was preempted"
    assert engine.metric("prefix_cache_hits_total") > 0, "nothing was cached"
    has_drafts = DRAFTS[0] in LAYOUTS[layout]
    assert (engine.metric("spec_decode_num_accepted_tokens_total") > 0) == has_drafts, "accepted drafts"


def victims(engine: EngineProcess) -> list[tuple[str, ...]]:
    """Return each process behind the api, and then all ranks at once."""
    names = [name for name in engine.actors() if role_of(name) not in ("supervisor", "api")]
    return [*((name,) for name in names), tuple(name for name in names if role_of(name) == "worker")]


def check_kills(engine: EngineProcess, calls: list[Call], expected: list[Json]) -> None:
    async def disturbed() -> None:
        deltas = Deltas(seed=len(expected))
        killer = asyncio.create_task(kill_in_turn(engine, deltas, victims(engine)))
        while not killer.done():
            found = await ask_all(engine.url, calls, deltas.note)
            check_same(calls, [protocols.without_usage(answer) for answer in found], expected, "killed")
        await killer

    asyncio.run(disturbed())


def check_kills_while_it_encodes(engine: EngineProcess, calls: list[Call], expected: list[Json]) -> None:
    """Kill each process as soon as the first of several pictures is being encoded."""

    async def disturbed(killed: tuple[str, ...]) -> None:
        reset = f"{engine.url}/admin/reset_prefix_cache"
        httpx.post(reset, json={}, timeout=WATCHDOG_S, headers=OPERATOR)
        before = engine.metric("encoder_calls_total")
        asked = asyncio.create_task(ask_all(engine.url, calls))

        def encodes() -> bool:
            return asked.done() or engine.metric("encoder_calls_total") != before

        await asyncio.to_thread(wait_until, encodes, what="a call of the encoder")
        await asyncio.to_thread(kill_together, engine, killed)
        found = [protocols.without_usage(answer) for answer in await asked]
        check_same(calls, found, expected, f"{' '.join(killed)} killed while pictures are encoded")

    for killed in victims(engine):
        asyncio.run(disturbed(killed))


def references(place: Path, calls: list[Call], options: tuple[str, ...]) -> list[Json]:
    with EngineProcess(place, *options, "--no-enable-prefix-caching") as engine:
        found = [ask(engine, [call])[0] for call in calls]
    num_different = len({json.dumps(answer) for answer in found})
    assert num_different > len(calls) // 2, f"{num_different} different answers to {len(calls)} requests say little"
    return found


def checks(
    config: Config, place: Path, precision: tuple[str, ...], names: list[str]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield layouts with their comparison."""
    has_pictures = "vision_config" in config
    streams, pictures = streams_and_wholes(), about_pictures() if has_pictures else []
    calls = [*streams, *every_kind(max_tokens=24), *pictures]
    if "quantization_config" in config and precision[0] == "--quantization":
        precision = precision[2:]
    common = (*OPTIONS, *precision, *(OF_PICTURES if has_pictures else ()))
    own = FEW_PICTURES if has_pictures else ()
    own += WHOLE_PICTURES if "use_bidirectional_attention" in config.get("text_config", {}) else ()
    expected = references(place, calls, common)
    of_streams, of_pictures = expected[: len(streams)], expected[len(calls) - len(pictures) :]

    def check(layout: str) -> None:
        with EngineProcess(place, *common, *LAYOUTS[layout], *own) as engine:
            check_same(calls, ask(engine, calls), expected, "together")
            check_same(calls, ask(engine, calls[::-1])[::-1], expected, "cached")
            check_counts(engine, layout)
            check_kills(engine, streams, of_streams)
            if has_pictures:
                check_kills_while_it_encodes(engine, pictures, of_pictures)
            engine.wait_until_idle()

    for name in names:
        yield name, lambda name=name: check(name)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    options = parser.parse_args()
    num_checked = num_failed = 0
    for model, precision in itertools.product(options.model, options.precision):
        is_mixture = "experts" in json.dumps(MODELS[model])
        layouts = [layout for layout in options.layout if is_mixture or "ep" not in layout.split("-")]
        with tempfile.TemporaryDirectory() as folder:
            place = written(MODELS[model], Path(folder, model))
            for layout, check in checks(MODELS[model], place, PRECISIONS[precision], layouts):
                num_checked += 1
                try:
                    check()
                except Exception:
                    num_failed += 1
                    print(f"{model} {precision} {layout}: {traceback.format_exc(limit=-2)}", flush=True)
                else:
                    print(f"{model} {precision} {layout}: same bytes", flush=True)
    print(f"{num_checked} engines, {num_failed} differ")
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
