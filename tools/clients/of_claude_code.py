"""Claude Code's CLI, started by `tokamak launch`."""

from __future__ import annotations

from tools.clients.checks import QUESTION, Server, check, launched, main


@check("an answer from the command line")
def answer(server: Server) -> None:
    said = launched(server, "claude", "-p", QUESTION)
    assert "12 + 30 =" in said, said


if __name__ == "__main__":
    main()
