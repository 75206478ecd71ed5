"""One model across many ranks, folded from what its parts declare; no part knows of it."""
