"""One step from message to result: the runner, the batch slots, the inputs, and the plans that run the model.

Read `runner.py` first, then `batch_slots.py` (state of a running sequence), `inputs.py` (inputs of one step) and `plan.py`
(eager, tape or graph).
"""
