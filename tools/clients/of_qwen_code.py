"""Qwen Code's CLI, with the settings of `--print-client qwen-code`."""

from __future__ import annotations

from tools.clients.checks import QUESTION, Server, check, main, printed, run


@check("an answer from the command line")
def answer(server: Server) -> None:
    *exports, command = printed(server, "qwen-code")
    said = run("bash", "-ec", "\n".join([*exports, f"{command} --prompt '{QUESTION}'"]), timeout_s=600)
    assert "12 + 30 =" in said, said


if __name__ == "__main__":
    main()
