"""Kernels and their choice: torch, and the groups of core. No parts, no modules."""
