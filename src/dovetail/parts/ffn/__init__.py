"""Feed-forwards: work on each token alone."""
