"""Recurrences, each in several forms: naive (the reference, token by token), chunked (matmuls), and a single decode step."""
