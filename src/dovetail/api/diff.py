"""Print the status of each tensor between two specs: kept, reinterpreted, transformed, new, dropped or impossible.

Weights are compared by path, layers by their number. `dovetail graft` applies the result to a checkpoint.

    dovetail diff mistral-7b llama-3-8b
    dovetail diff llama-tiny llama-tiny --set 'layers.*.mixer.kv_heads=1' --swap position=alibi
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from dovetail.api.arguments import Changes, SpecLike, read_spec

if TYPE_CHECKING:
    from dovetail.api.spec_diff import SpecDiff
from dovetail.api.options import SPEC, Sets, Spec, Swaps


def diff(
    a: Annotated[SpecLike, SPEC],
    b: Annotated[SpecLike, Spec("Another one.", argument=True)],
    *,
    set: Annotated[Changes, Sets("Change a field of B: --set layers.*.mixer.kv_heads=1; may be given many times.")] = (),
    swap: Annotated[
        Changes,
        Swaps("Change a part of B in every layer: --swap position=alibi; may be given many times, applied before --set."),
    ] = (),
) -> SpecDiff:
    """Compare two specs tensor by tensor: each is kept, reinterpreted, transformed, new, dropped or impossible to carry over.

    `set` and `swap` change b first. Tensors are compared by path, layers by their number.
    """
    from dovetail.api.spec_diff import with_names
    from dovetail.weights.surgery import diff as diff_specs

    first, second = read_spec(a), read_spec(b).after(set, swap)
    return with_names(diff_specs(first.spec, second.spec), (first.name, second.name))
