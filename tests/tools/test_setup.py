"""tools/setup.sh: what it installs for which options, and when it builds anew."""

from __future__ import annotations

import fcntl
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY


def shell(code: str, *arguments: str, environment: dict[str, str] | None = None, directory: Path = REPOSITORY) -> str:
    """What `code` prints after sourcing the copy of tools/setup.sh in `directory`."""
    command = ["bash", "-c", f"source tools/setup.sh; {code}", "bash", *arguments]
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", **(environment or {})}
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"exit {done.returncode}: {done.stderr}"


@pytest.mark.parametrize(
    ("arguments", "environment", "file", "expected"),
    [
        ([], {}, "", ""),
        (["--model", "reference", "--ops", "native"], {"TOKAMAK_OPS": "reference"}, "", ""),
        (["--ops", "reference"], {}, "", "cpu"),
        (["MODEL", "--ops=reference"], {}, "", "cpu"),
        ([], {"TOKAMAK_OPS": "reference"}, "", "cpu"),
        ([], {}, "model: x\nops: reference\n", "cpu"),
        ([], {}, '{"ops": "reference", "port": 1}', "cpu"),
        (["--ops", "auto"], {}, "ops: reference\n", ""),
        ([], {}, "model: ops\n# reference\n", ""),
        (["--device", "gpu", "--ops", "reference"], {}, "", "gpu"),
        ([], {"TOKAMAK_DEVICE": "xpu"}, "", "xpu"),
        ([], {"TOKAMAK_EXTRA": "cpu"}, "", "cpu"),
    ],
)
def test_paddle_is_installed_where_options_need_it(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], file: str, expected: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(file)
    given = ["--config", str(config), *arguments] if file else arguments
    assert shell('paddle_build "$@"', *given, environment=environment) == expected


@pytest.mark.parametrize(
    ("wanted", "built", "will_do"),
    [
        ("best", "best", True),
        ("best", "runnable", True),
        ("runnable", "best", False),
        ("all", "runnable", False),
        ("best", "all", True),
    ],
)
def test_more_kernels_than_wanted_will_do(wanted: str, built: str, will_do: bool) -> None:
    assert shell('has_level "$@" && echo yes || echo no', wanted, built) == ("yes" if will_do else "no")


def test_native_modules_are_built_anew_where_a_source_or_a_package_changes(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.sh").write_text((REPOSITORY / "tools" / "setup.sh").read_text())
    (tmp_path / "CMakeLists.txt").write_text("")
    for place in ("shm/native", "ops/cpu/native"):
        (tmp_path / place).mkdir(parents=True)
    seen = {shell("package_fingerprint=1; native_fingerprint", directory=tmp_path)}
    assert seen == {shell("package_fingerprint=1; native_fingerprint", directory=tmp_path)}
    for number, name in enumerate(
        ("CMakeLists.txt", "shm/native/a.cpp", "ops/cpu/native/b.inc", "ops/cpu/native/c.h"), start=2
    ):
        (tmp_path / name).write_text("changed")
        seen.add(shell("package_fingerprint=1; native_fingerprint", directory=tmp_path))
        assert len(seen) == number
    (tmp_path / "shm" / "ring.py").write_text("used in place")
    seen.add(shell("package_fingerprint=1; native_fingerprint", directory=tmp_path))
    assert len(seen) == 5
    seen.add(shell("package_fingerprint=2; native_fingerprint", directory=tmp_path))
    assert len(seen) == 6


def test_an_interpreter_may_lie_anywhere(tmp_path: Path) -> None:
    python = tmp_path / "a directory" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert shell("find_python", environment={"TOKAMAK_PYTHON": str(python)}) == str(python)
    assert "no Python 3.10 to 3.13 found" in shell("find_python", environment={"TOKAMAK_PYTHON": "/nowhere"})


def test_modules_are_compiled_once(tmp_path: Path) -> None:
    """Though a container says that Python shall not."""
    (tmp_path / "module.py").write_text("")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable}
    assert shell('"$PYTHON" -c "import module"', environment=environment) == ""
    assert list(tmp_path.glob("__pycache__/module.*.pyc"))


def test_a_setup_that_waits_for_another_says_so(tmp_path: Path) -> None:
    command = ["bash", "-c", "source tools/setup.sh; lock_venv; echo done"]
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TOKAMAK_VENV": str(tmp_path)}
    with (tmp_path / ".tokamak-lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with subprocess.Popen(
            command, cwd=REPOSITORY, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as waiting:
            assert waiting.stdout is not None
            assert waiting.stderr is not None
            select.select([waiting.stderr], [], [], 60)
            fcntl.flock(other, fcntl.LOCK_UN)
            assert (waiting.stderr.read(), waiting.stdout.read()) == (
                f"tokamak: waiting for another tools/serve or tools/test that installs into {tmp_path}\n",
                "done\n",
            )


def test_a_failed_job_ends_the_others_and_shows_its_messages(tmp_path: Path) -> None:
    """Its last words, without what pip says of other indexes."""
    code = "begin good sleep 100; begin bad bash -c 'echo WARNING: Location x is ignored; echo last; exit 3'; wait_for_jobs"
    printed = shell(code, environment={"TOKAMAK_VENV": str(tmp_path)})
    assert printed.startswith("exit 1:")
    assert "last" in printed
    assert "Location" not in printed
    assert str(tmp_path / "bad.log") in printed
