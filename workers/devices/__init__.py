"""Devices: where a rank's tensors are, which ops run there, and with which kernels. Read `device.py` first.

cuda/    NVIDIA's cards by their driver alone
"""
