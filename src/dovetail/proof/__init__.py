"""Proof that a model computes what it should: laws on our specs (laws), on other models (foreign) and servers (served); where
two implementations diverge (compare), and why rollouts do (rollouts)."""
