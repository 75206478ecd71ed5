"""Batches from data, each a pure function of (seed, step)."""
