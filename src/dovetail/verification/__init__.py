"""verify: where two implementations of a model part, whether that is rounding or a bug, and what kind of bug."""
