"""Interpretability: activations by address, attention maps and plots."""
