"""Compare two specs tensor by tensor, and carry a checkpoint of one over to the other.

result = diff(a, b)                            rows: a tensor of a, a tensor of b, its status, how it is carried over
result = diff(a, b, picks)                     layer j of b is compared with layer picks[j] of a
tensors = apply(result, tensors_of_a, init_b)  the tensors of b, with every transformation applied
"""

from dovetail.weights.surgery.resize import parse_picks, picked
from dovetail.weights.surgery.status import Diff, DiffRow, Status, diff
from dovetail.weights.surgery.transfer import apply

__all__ = ["Diff", "DiffRow", "Status", "apply", "diff", "parse_picks", "picked"]
