"""What becomes of trained weights: adapters, fewer bits, another spec."""
