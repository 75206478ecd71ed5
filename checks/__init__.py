"""Checks that run from a clone of the repository and are not in the wheel."""
