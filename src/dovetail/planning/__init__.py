"""Planning: what a training step costs on many ranks, from running it on a fake process group."""
