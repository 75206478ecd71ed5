"""Number formats of fewer bits: integers of 8 and 4 bits, NormalFloat, floats of 8 bits; and torch's fast kernels for them."""
