"""Popular clients, each tested against a server of the embedded model in its own environment: `tools/test-clients`.

checks.py          what a check is, and how the checks of a client run: in its environment, without our packages, so they and
                   this file import only the standard library and the client
of_NAME.py         the checks of one client
run.py             starts the servers, runs all clients, writes the table
requirements.txt   the versions that are tested
results.md         the table of the last committed run
"""
