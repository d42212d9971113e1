"""Batches of requests: `/v1/batches`, in OpenAI's shape, on top of `api/files`. Read `routes.py` first.

lines.py    a request's line, and its answer's; `tokamak run-batch` has the same
batch.py    a batch and its state
ledger.py   the answers of a batch in its two files
runner.py   carries batches out, in the api process that gets a batch's lock
"""
