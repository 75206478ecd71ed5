"""Positions: RoPE and its scalings, ALiBi, T5 bias, learned, sinusoidal, none, streaming."""
