"""Mixers: what moves information between tokens."""
