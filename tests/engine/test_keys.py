"""Secrets are in no file, no foreign process and no process list."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.keys import environment_of, with_secrets, without_secrets
from tests.configurations import engine_config
from tests.paths import REPOSITORY

SECRETS = {"object_store_secret_key": "s3-secret", "object_store_session_token": "s3-token"}
CONFIG = engine_config(model="/m", max_model_len=8, num_kv_blocks=2, run_id="00000000", run_dir="/r", **SECRETS)
LAUNCHER = {"PATH": "/bin", "TOKAMAK_API_KEY": "k", "TOKAMAK_ADMIN_KEY": "k", "AWS_SECRET_ACCESS_KEY": "k"}


def test_only_api_processes_get_signing_keys() -> None:
    written = without_secrets(CONFIG)
    assert (written.object_store_secret_key, written.object_store_session_token) == ("", "")
    assert with_secrets(written, environment_of(CONFIG, "api", LAUNCHER)) == CONFIG
    for role in ("media", "worker", "scheduler", "tokenizer", "cache"):
        assert environment_of(CONFIG, role, LAUNCHER) == {"PATH": "/bin"}
    assert environment_of(written, "api", LAUNCHER) == {"PATH": "/bin"}


SHOWN = """
import sys
from pathlib import Path
from engine.keys import hide_arguments
hide_arguments()
sys.stdout.buffer.write(Path("/proc/self/cmdline").read_bytes())
"""


def test_secrets_leave_the_command_line() -> None:
    arguments = [
        "--model",
        "m",
        "--api-key",
        "k1",
        "--admin_key=k2",
        "--port",
        "80",
        "--api-key",
        "k3",
        "k4",
        "--api-key-p",
        "k=1",
    ]
    shown = subprocess.run(
        [sys.executable, "-c", SHOWN, *arguments, "--object-store-secret-key=k5"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout.decode()
    assert shown.rstrip("\0").split("\0")[3:] == [
        *("--model", "m", "--api-key", "**", "--admin_key=**", "--port", "80", "--api-key", "**", "**", "--api-key-p", "***"),
        "--object-store-secret-key=**",
    ]


@pytest.mark.slow
def test_files_of_a_run_have_no_secrets(tmp_path: Path) -> None:
    """A whole engine, from its start to its end."""
    from tests.e2e.engine_process import DEMO, EngineProcess

    secrets = ("key-of-clients", "key-of-admins", "key-of-the-store")
    options = ("--api-key", secrets[0], "--object-store-access-key", "id", "--object-store-secret-key", secrets[2])
    engine = EngineProcess(DEMO, *options, environment={"XDG_RUNTIME_DIR": str(tmp_path), "TOKAMAK_ADMIN_KEY": secrets[1]})
    given = engine.command.index("--admin-key")
    del engine.command[given : given + 2]
    with engine:
        found = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert b"served_model_name" in found
        pids = [engine.pid, *map(int, subprocess.check_output(["pgrep", "-P", str(engine.pid)]).split())]
        found += b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        found += b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in pids[1:])
        assert [secret for secret in secrets if secret.encode() in found] == []
    assert not any(secret in engine.text for secret in secrets)
    assert os.listdir(tmp_path / "tokamak") in ([], [".lock"])
