"""Seeded bugs of heads: documents of a batch pooled together, padding pooled with them."""

from __future__ import annotations

from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.layout import TokenLayout
from dovetail.ops import pooling as ops
from dovetail.parts import head
from dovetail.proof.laws.mutant import Mutant, instead, spec

_pool, _documents_of = ops.pool, ops.documents_of


def pooled_by_row(layout: TokenLayout) -> None:
    """One answer per row of a batch, and one for a whole flat batch."""


def neighbor_in_a_flat_batch(layout: TokenLayout) -> tuple[Tensor, int] | None:
    """Row 1 is pooled with row 0."""
    documents = _documents_of(layout)
    return documents if documents is None or layout.row is None else (documents[0].where(documents[0] != 1, 0), documents[1])


def padding_pooled(x: Tensor, layout: TokenLayout, pooling: ops.Pool) -> Tensor:
    """The mean of a padded row counts its padding."""
    if layout.start is not None or layout.row is not None:
        return _pool(x, layout, pooling)
    return _pool(x, TokenLayout.of(layout.order, layout.seg.clamp_min(0)), pooling)


def pooling(kind: str, how: str) -> Model:
    """A model with a head that pools."""
    return spec().set("head", {"kind": kind, "pooling": how})


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    together = instead(ops, "documents_of", pooled_by_row)
    neighbor = instead(ops, "documents_of", neighbor_in_a_flat_batch)
    padding = instead(head, "pool", padding_pooled)
    return [
        Mutant("packed documents are pooled as one", "padded", together, pooling("classifier", "first")),
        Mutant("a flat batch has one reward", "padded", together, pooling("reward", "last")),
        Mutant("a row of a flat batch is pooled with its neighbor", "padded", neighbor, pooling("pooled_embedding", "mean")),
        Mutant("the mean of a row counts its padding", "padded", padding, pooling("pooled_embedding", "mean")),
    ]
