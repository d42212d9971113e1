"""One step from message to result: the runner, the batch slots, what a step reads, and how the model is run on it.

Read `runner.py` first, then `batch_slots.py` (what is kept of a running sequence), `inputs.py` (what one step reads) and
`plan.py` (eager, tape or graph).
"""
