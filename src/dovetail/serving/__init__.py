"""Serving: an engine that runs many requests at once, and its HTTP interface."""
