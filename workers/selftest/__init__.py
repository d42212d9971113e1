"""Checks on the rank's device before it serves: fused ops, CUDA ops and whole steps. Read `op_choice.py` first."""
