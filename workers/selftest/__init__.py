"""Checks on the rank's device before it serves: ops, CUDA's rows and whole steps. Read `op_choice.py` first."""
