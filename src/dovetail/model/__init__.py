"""A whole model: its spec and forward pass, its construction, and `Transformer` with the methods that people call."""
