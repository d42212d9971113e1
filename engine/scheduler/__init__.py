"""The scheduler's process: which tokens of which sequences the ranks compute next, in which blocks, with which weights.

Read `actor.py` first (the loop), then `sequence.py` (how far a sequence is), `policy.py` (the one scheduling rule, pure),
`batch_state.py` (all sequences and their blocks), `dispatch.py` and `results.py` (a step on its way and back); `commands.py`,
`weight_updates.py` and `weight_state.py` (pause, reload).
"""
