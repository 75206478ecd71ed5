"""Two specs: what becomes of each tensor, and carrying a checkpoint of the one over to the other.

found = diff(a, b)                            rows: a tensor of a, a tensor of b, its fate, how
found = diff(a, b, picks)                     layer j of b is compared with layer picks[j] of a
tensors = apply(found, tensors_of_a, init_b)  the tensors of b, every transformation done
"""

from dovetail.surgery.carry import apply
from dovetail.surgery.fate import Diff, Fate, Row, diff
from dovetail.surgery.pick import parse_picks, picked

__all__ = ["Diff", "Fate", "Row", "apply", "diff", "parse_picks", "picked"]
