"""Entities in BIO tags, and the counts of which precision, recall and F1 are ratios.

    O O B-PER I-PER O B-LOC      ->      (2, 4, PER), (5, 6, LOC)

B-X begins an entity of the type X, I-X continues it; an I-X after another type or after O begins one, as in conlleval
(Tjong Kim Sang & De Meulder 2003). An entity is right if its type and both ends are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

OUTSIDE = "O"
COUNTS = ("right", "predicted", "labeled")


def are_bio(names: Sequence[str]) -> bool:
    """Whether tags are BIO, with at least one entity among them."""
    entities = [name for name in names if name != OUTSIDE]
    return bool(entities) and all(name[:2] in ("B-", "I-") and len(name) > 2 for name in entities)


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """The entities of a row: start, stop and type."""
    found, start, kind = set[tuple[int, int, str]](), 0, ""
    for i, tag in enumerate([*tags, OUTSIDE]):
        own = tag[2:] if tag != OUTSIDE else ""
        if kind and (tag.startswith("B-") or own != kind):
            found.add((start, i, kind))
            kind = ""
        if own and not kind:
            start, kind = i, own
    return found


def count_entities(predicted: Sequence[Sequence[str]], labeled: Sequence[Sequence[str]]) -> dict[str, int]:
    """How many entities of several rows are right, predicted and labeled."""
    pairs = [(entities(one), entities(other)) for one, other in zip(predicted, labeled, strict=True)]
    rights = sum(len(one & other) for one, other in pairs)
    return dict(zip(COUNTS, (rights, sum(len(one) for one, _ in pairs), sum(len(other) for _, other in pairs)), strict=True))


def scores(counts: Mapping[str, float]) -> dict[str, float]:
    """Precision, recall and F1 of counts, or of their means; 0 where there is no entity to divide by."""
    right, predicted, labeled = (counts[name] for name in COUNTS)
    ratios = {"precision": (right, predicted), "recall": (right, labeled), "f1": (2 * right, predicted + labeled)}
    return {name: above / below if below else 0.0 for name, (above, below) in ratios.items()}
