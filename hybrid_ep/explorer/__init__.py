"""Simulated worlds: the real kernels of all ranks in one process, their interleavings explored by seed. Needs the
compiled core."""
