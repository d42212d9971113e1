"""Builds and runs the image without a container runtime: `python -m tools.deploy.rehearsal DIRECTORY`.

Each stage of the Containerfile is a Debian root in DIRECTORY (made by debootstrap; kept, so that a second rehearsal continues
where the first ended), in which its steps run by chroot. The result is started as the pod starts it (`containment.py`), checked
by the image's own health check, and asked a question at its port. Needs root, debootstrap and the registries.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from engine.errors import TokamakError
from engine.installation import PACKAGES
from tools.deploy.containment import contained

CONTAINERFILE = Path(__file__).with_name("Containerfile")
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_READY_S = 120.0


class Instruction(NamedTuple):
    """Instruction of a Containerfile: its name in capitals, and its arguments."""

    name: str
    text: str

    @property
    def command(self) -> list[str]:
        """Return a command in JSON form; options before it are skipped."""
        words: list[str] = json.loads(self.text[self.text.index("[") :])
        return words


def stages(path: Path = CONTAINERFILE) -> list[list[Instruction]]:
    """Return the instructions of each stage, starting with FROM."""
    found: list[list[Instruction]] = []
    for line in path.read_text().replace("\\\n", "").splitlines():
        if line and not line.startswith("#"):
            name, _, text = line.partition(" ")
            if name == "FROM":
                found.append([])
            found[-1].append(Instruction(name, text))
    return found


def environment(stage: list[Instruction]) -> dict[str, str]:
    """Variables of a stage."""
    pairs = (word.partition("=") for name, text in stage if name == "ENV" for word in shlex.split(text))
    return {name: value for name, _, value in pairs}


def build(directory: Path) -> Path:
    """Run every step and return the root of the last stage."""
    roots: dict[str, Path] = {}
    root = directory
    for index, stage in enumerate(stages()):
        base, _, name = stage[0].text.partition(" AS ")
        root = directory / f"stage{index}"
        roots[name or str(index)] = root
        if not root.exists():
            subprocess.run(["cp", "--archive", _debian(directory, base), partial := directory / "partial"], check=True)
            partial.rename(root)
        done = root / ".steps"
        for number, step in enumerate(stage):
            if step.name in ("COPY", "RUN") and number >= int(done.read_text() if done.exists() else 0):
                print(f"{step.name} {step.text}", flush=True)
                _copy(step.text, root, roots) if step.name == "COPY" else _run(step.text, root, environment(stage))
                done.write_text(str(number + 1))
    return root


def _debian(directory: Path, base: str) -> Path:
    suite = base.rpartition(":")[2].removesuffix("-slim")
    root = directory / suite
    if not root.exists():
        subprocess.run(["debootstrap", "--variant=minbase", suite, partial := directory / "partial"], check=True)
        partial.rename(root)
    return root


def _copy(text: str, root: Path, roots: dict[str, Path]) -> None:
    *options, source, target = text.split()
    if options:
        origin = roots[options[0].removeprefix("--from=")] / source.lstrip("/")
        shutil.copytree(origin, root / target.lstrip("/"), symlinks=True, dirs_exist_ok=True)
        return
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PACKAGES, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and not name.startswith((".", "tests/")) and (PACKAGES / name).is_file():  # patterns of .dockerignore
            place = root / target.lstrip("/") / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PACKAGES / name, place)


def _run(text: str, root: Path, variables: dict[str, str]) -> None:
    """Run a command by chroot, with what this machine needs to reach registries: DNS, certificates, pip's settings."""
    shutil.copy2("/etc/resolv.conf", root / "etc" / "resolv.conf")
    known = {name: value for name, value in os.environ.items() if name.endswith("_proxy")}
    if Path(AUTHORITIES).exists():
        shutil.copy2(AUTHORITIES, root / "run" / "authorities.crt")
        known |= {"PIP_CERT": "/run/authorities.crt", "SSL_CERT_FILE": "/run/authorities.crt"}
    variables = {"PATH": os.defpath, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **known, **variables}
    mounts = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" env -i "${@:2}" /bin/sh -c "$1"'
    given = [f"{name}={value}" for name, value in variables.items()]
    subprocess.run(["unshare", "--mount", "bash", "-c", mounts, str(root), text, *given], check=True)


def rehearse(root: Path) -> None:
    """Start the image, wait until it is healthy, ask it a question, stop it. TokamakError if any of this fails."""
    *_, image = stages()
    variables = {**environment(image), "TOKAMAK_HOST": "127.0.0.1"}
    (user,) = {int(text.partition(":")[0]) for name, text in image if name == "USER"}
    (entry,) = (step.command for step in image if step.name == "ENTRYPOINT")
    (health,) = (step.command for step in image if step.name == "HEALTHCHECK")
    command = contained(root, entry, user=user, environment=variables, memory=("/tmp", "/cache"), is_root=True)
    start_s = time.monotonic()
    with subprocess.Popen(command) as runtime:
        while not _is_well(runtime, health, variables):
            if runtime.poll() is not None or time.monotonic() - start_s > _READY_S:
                runtime.kill()
                raise TokamakError(f"the image did not become well within {_READY_S:.0f} s")
            time.sleep(0.2)
        print(f"well after {time.monotonic() - start_s:.1f} s")
        body = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}).encode()
        url = f"http://127.0.0.1:{variables['TOKAMAK_PORT']}/v1/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            print(json.load(answer)["choices"][0]["message"]["content"])
        subprocess.run(["kill", "-TERM", _inside(runtime)], check=True)
        if code := runtime.wait(60):
            raise TokamakError(f"the image ended with exit code {code}")


def _inside(runtime: subprocess.Popen[bytes]) -> str:
    """Return the pid of the image's first process, as seen from outside."""
    return Path(f"/proc/{runtime.pid}/task/{runtime.pid}/children").read_text().strip()


def _is_well(runtime: subprocess.Popen[bytes], health: list[str], variables: dict[str, str]) -> bool:
    if not (process := _inside(runtime)):
        return False
    given = [f"{name}={value}" for name, value in variables.items()]
    entering = ["nsenter", f"--target={process}", "--mount", "--pid", "--root", "--wd", "env", "-i"]
    return subprocess.run([*entering, *given, *health], capture_output=True, check=False).returncode == 0


def main(arguments: list[str]) -> int:
    """Build and rehearse in the given directory; return the exit code."""
    (directory,) = map(Path, arguments)
    directory.mkdir(parents=True, exist_ok=True)
    rehearse(build(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
