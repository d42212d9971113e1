"""`tokamak run-batch`: answers the requests in the lines of a file in another file, in OpenAI's batch format.

../../api/batches/lines.py  a line of each file
ledger.py   the answers on disk: in order, each written once even after a crash
command.py  the subcommand; read it first
"""
