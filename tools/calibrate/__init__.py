"""`tokamak calibrate`: statistics of a model's activations over a text, for better rounding. Read `command.py` first."""
