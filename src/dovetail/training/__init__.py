"""One training loop, with what is to be learned passed in."""
