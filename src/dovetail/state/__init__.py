"""Decode state: the KV caches and recurrent states that parts declare with `state()`, allocated, read, rolled back, forked."""
