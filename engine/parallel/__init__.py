"""Decisions across replicas and ranks, as pure functions: `routing.py` chooses the replica of a prompt, `placement.py` the
ranks of experts, `eplb.py` when and how they move.
"""
