"""Weights and KV caches of fewer bits."""
