"""Decode memory: what parts declare with `state()`, allocated, written, read, rolled back and forked. Imports core alone."""
