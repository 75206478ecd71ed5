"""dist: one model over many ranks, folded from what its parts declare; nothing in a part knows of it."""
