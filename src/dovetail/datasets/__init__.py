"""Data to batches, each a pure function of (seed, step)."""
