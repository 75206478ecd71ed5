"""Two specs: what becomes of each tensor, and carrying a checkpoint of the one over to the other.

found = diff(a, b)                            rows: a tensor of a, a tensor of b, its fate, how
tensors = apply(found, tensors_of_a, init_b)  the tensors of b, every transformation done
"""

from dovetail.diff.carry import apply
from dovetail.diff.fate import Diff, Fate, Row, diff

__all__ = ["Diff", "Fate", "Row", "apply", "diff"]
