"""Where this rank's tensors live and which ops run there, with which kernels. Read `device.py` first."""
