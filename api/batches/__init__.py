"""Batches of requests: `/v1/batches`, in OpenAI's format, based on `api/files`. Read `routes.py` first.

lines.py    lines of requests and answers, also for `tokamak run-batch`
batch.py    a batch and its state
ledger.py   the answers of a batch in its two files
runner.py   runs batches, in the api process that gets a batch's lock
"""
