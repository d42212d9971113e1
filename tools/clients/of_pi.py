"""pi's CLI, with the settings of `--print-client pi`."""

from __future__ import annotations

from pathlib import Path

from tools.clients.checks import QUESTION, Server, check, main, printed, run


@check("an answer from the command line")
def answer(server: Server) -> None:
    head, *lines = printed(server, "pi")
    path = Path(head.removeprefix("// ")).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    said = run("pi", "--provider", "tokamak", "--model", server.agent, "--print", QUESTION, timeout_s=600)
    assert "12 + 30 =" in said, said


if __name__ == "__main__":
    main()
