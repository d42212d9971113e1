"""`tokamak trace`."""
