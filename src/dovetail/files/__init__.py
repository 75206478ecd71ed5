"""Specs and model directories: read as untrusted input, written whole or not at all."""
