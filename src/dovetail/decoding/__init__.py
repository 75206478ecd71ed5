"""Decoding: steps of a model with its decode state, eager or compiled; sampled tokens, beams, text, embeddings and
tags."""
