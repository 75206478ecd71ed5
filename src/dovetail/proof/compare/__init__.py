"""Verify: where two implementations of a model diverge, whether that is rounding or a bug, and which bug."""
