"""Cline's CLI, with the settings of `--print-client cline`."""

from __future__ import annotations

import json
import subprocess

from tools.clients.checks import QUESTION, Server, check, main, printed, run


@check("an answer from the command line")
def answer(server: Server) -> None:
    auth, command, _ = printed(server, "cline")
    run("bash", "-ec", auth, timeout_s=60)
    # the exit code is not checked: it says whether the task was completed, which the embedded model cannot do
    done = subprocess.run([command, "--json", QUESTION], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    events = [json.loads(line).get("event", {}) for line in done.stdout.splitlines() if line.startswith("{")]
    texts = [each.get("text") for each in events if each.get("contentType") == "text"]
    assert any(texts), done.stdout[-2000:] + done.stderr[-2000:]


if __name__ == "__main__":
    main()
