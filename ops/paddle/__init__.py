"""The op table in plain Paddle, on any device that Paddle has: the oracle of every test (`reference.py`)."""
