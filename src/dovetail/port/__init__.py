"""Specs and weights to and from the names of the outside world. Nothing here imports the libraries whose names it knows."""
