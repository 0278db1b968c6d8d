"""Fused attention over pages on the CPU: the C++ kernel, its compilation and its backend."""
