"""Simulated worlds: the real kernels of all ranks in one process, explored by seed or run on a virtual clock."""
