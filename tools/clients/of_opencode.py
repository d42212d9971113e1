"""opencode's CLI, started by `tokamak launch`."""

from __future__ import annotations

from tools.clients.checks import QUESTION, Server, check, launched, main


@check("an answer from the command line")
def answer(server: Server) -> None:
    said = launched(server, "opencode", "run", QUESTION)
    shown = said.rpartition(server.agent)[2].replace("\x1b[0m", "").strip()
    assert shown, said  # any text: opencode quotes the question, which the embedded model was not trained on


if __name__ == "__main__":
    main()
