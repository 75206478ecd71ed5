"""Specs and weights to and from Hugging Face's names. Nothing here imports transformers.

An installed package offers a dialect by the entry-point group `dovetail.dialects`; it is checked before it is registered.
"""

from importlib.metadata import entry_points

from dovetail.hf.check import register

for offered in entry_points(group="dovetail.dialects"):
    register(offered.load())
