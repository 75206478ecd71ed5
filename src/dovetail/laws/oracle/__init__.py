"""Law 14, its own number: literal oracles for every kind that comes with Dovetail, one file a group."""

from dovetail.laws.oracle import act, embed, ffn, head, init, mask, mixer, norm, position, scaling, state_space, wire
from dovetail.laws.oracle.registry import (
    ORACLES,
    Comparison,
    Failure,
    ask_kinds,
    check_oracles,
    comparisons,
    missing,
    oracle,
)
from dovetail.laws.oracle.stand import alone, numbers, part

__all__ = [
    "ORACLES",
    "Comparison",
    "Failure",
    "act",
    "alone",
    "ask_kinds",
    "check_oracles",
    "comparisons",
    "embed",
    "ffn",
    "head",
    "init",
    "mask",
    "missing",
    "mixer",
    "norm",
    "numbers",
    "oracle",
    "part",
    "position",
    "scaling",
    "state_space",
    "wire",
]
