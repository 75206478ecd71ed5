"""What runs: modules, linear leaves, the Ctx of a forward pass with its token layout, taps, draws and ranks; blocks."""
