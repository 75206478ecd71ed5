"""Seeded bugs: one file per area, each with the mutated functions and its table; `checks.mutants.run` seeds them all."""
