"""Looking into a model: activations by address, and pictures of them."""
