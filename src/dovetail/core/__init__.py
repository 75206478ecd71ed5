"""The contract: what a part is, what it answers, and the folds over the answers. Imports nothing of ours."""
