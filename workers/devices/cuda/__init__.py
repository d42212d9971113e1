"""NVIDIA's cards by their driver alone."""
