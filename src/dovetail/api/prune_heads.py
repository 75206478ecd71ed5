"""Remove heads of attention from a model.

_, drops = dt.look.ablate(model, ids, "layers.*.mixer.z[head]", metric).table()      (layers, heads) what each one contributes
smaller = dt.prune_heads(model, {0: [1, 3], 2: [0]})                                  without three of them
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dovetail.model.transformer import Transformer
from dovetail.weights.surgery import heads as surgery


def prune_heads(model: Transformer, heads: Mapping[int, Collection[int]]) -> Transformer:
    """Return a model without these heads: layer → the numbers of its heads to remove.

    Its logits are those of the model with the outputs of these heads replaced by 0. The weights are copies. Query heads that
    share a KV head are removed together; a mask that differs by head, or a constant computed from the number of heads (the
    slopes of ALiBi), raises SpecError with the path. `graft` removes whole layers.
    """
    pruned = surgery.prune_heads(model, heads)
    assert isinstance(pruned, Transformer)
    pruned.vocabulary = model.vocabulary
    return pruned
