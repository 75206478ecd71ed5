"""Emit: a spec as one plain PyTorch file that imports nothing of ours."""
