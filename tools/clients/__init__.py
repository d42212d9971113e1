"""Clients that people have, each against a server of the embedded model, in an environment of its own: `tools/test-clients`.

checks.py          what a check is, and how those of a client are run: in its environment, where nothing of ours is
                   installed, so that it and they import the standard library and the client alone
of_NAME.py         the checks of one client
run.py             starts the servers, runs all clients, writes the table
requirements.txt   the versions that are tested
results.md         the table of the last run that someone committed
"""
