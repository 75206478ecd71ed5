"""Recurrences, each in its forms side by side: naive (token by token, to be read), chunked (matmuls), and a single step."""
