"""Seeded bugs: one file per area, each with the mutated functions and its table; `run.py` runs them all."""
