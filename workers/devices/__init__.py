"""Where this rank's tensors live and which ops run there. Read `device.py` first."""
