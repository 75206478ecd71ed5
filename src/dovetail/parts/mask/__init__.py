"""Masks: which keys a query may see."""
