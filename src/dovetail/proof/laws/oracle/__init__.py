"""Law 14, own_number: the registry of oracles, and what an oracle needs to run one part by itself.

The literal numbers of Dovetail's own kinds are in its repository (checks/oracles), not in the wheel.
"""

from dovetail.proof.laws.oracle.registry import (
    ORACLES,
    Comparison,
    Failure,
    check_oracles,
    comparisons,
    differs,
    grouped_kinds,
    kinds_to_test,
    missing,
    oracle,
)
from dovetail.proof.laws.oracle.single import REAL, alone, ctx, eye, numbers, part, row

__all__ = [
    "ORACLES",
    "REAL",
    "Comparison",
    "Failure",
    "alone",
    "check_oracles",
    "comparisons",
    "ctx",
    "differs",
    "eye",
    "grouped_kinds",
    "missing",
    "numbers",
    "oracle",
    "part",
    "row",
    "kinds_to_test",
]
