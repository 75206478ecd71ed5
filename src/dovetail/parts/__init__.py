"""The parts that come with Dovetail: one line each file. A user's package adds its own by the entry point `dovetail.parts`."""

from importlib.metadata import entry_points

from dovetail.parts import act, embed, head, init, norm
from dovetail.parts.ffn import glu, mlp
from dovetail.parts.mask import join, near, sparse
from dovetail.parts.mixer import attention, mamba2
from dovetail.parts.position import alibi, learned, none, relative, rope, scaling, sinusoidal

__all__ = [
    "act",
    "alibi",
    "attention",
    "embed",
    "glu",
    "head",
    "init",
    "join",
    "learned",
    "mamba2",
    "mlp",
    "near",
    "none",
    "norm",
    "relative",
    "rope",
    "scaling",
    "sinusoidal",
    "sparse",
]

for offered in entry_points(group="dovetail.parts"):
    offered.load()
