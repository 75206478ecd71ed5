"""Synthetic tasks: rows of tokens with exact answers, which show what an architecture can compute."""
