"""Rollouts: why the log-probs that a sampler recorded differ from those of the trainer's model."""
