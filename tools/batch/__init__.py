"""`tokamak run-batch`: the requests in a file's lines, answered in those of another, in OpenAI's batch format.

../../api/batches/lines.py  a line of each file
ledger.py   the answers: in order, each written once, whoever dies; what is there already
command.py  the subcommand; read it first
"""
