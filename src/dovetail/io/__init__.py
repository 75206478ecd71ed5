"""Specs and YAML, model directories, tensors. Every file is read as untrusted input."""
