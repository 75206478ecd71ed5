"""Sampled specs: legal, reproducible, and covering the pairs that they report."""

import itertools
import random

import pytest

from dovetail.proof.laws import cover
from dovetail.proof.laws.cover import Factor, PairCover, all_factors, consistent, meeting, pairs_of, pins, scopes
from dovetail.proof.laws.sample import BLOCK, attempt
from dovetail.spec.check import check
from dovetail.spec.part import KINDS


def test_samples_are_legal_and_reproducible():
    one, other = ([s for _ in range(20) if (s := attempt(random.Random(i), {}))] for i in (3, 3))
    assert one == other
    for spec in one:
        check(spec)


def test_pins_name_the_kinds_above():
    factor = Factor(f"{BLOCK}/mixer=attention/position=rope/base", "100.0", False)
    assert pins(factor) == {
        f"{BLOCK}/mixer=attention/position=rope/base": "100.0",
        "model/layers": "block",
        f"{BLOCK}/mixer": "attention",
        f"{BLOCK}/mixer=attention/position": "rope",
    }


def test_a_pinned_sample_has_the_pinned_values():
    factor = Factor(f"{BLOCK}/mixer=attention/position=rope/base", "100.0", False)
    drawn = [spec for i in range(40) if (spec := attempt(random.Random(i), pins(factor)))]
    held = [spec for spec in drawn if any(factor in scope for scope in scopes(spec))]
    assert len(held) >= 10


def test_two_kinds_in_one_slot_are_not_a_pair():
    rope = Factor(f"{BLOCK}/mixer=attention/position=rope/base", "100.0", False)
    alibi = Factor(f"{BLOCK}/mixer=attention/position", "alibi", True)
    assert not consistent(rope, alibi)


def test_counted_pairs_equal_those_of_the_dense_mask():
    def inside(a: Factor, b: Factor) -> bool:
        """Whether the part of one is that of the other or lies in it."""
        return a.node == b.node or a.node.startswith(f"{b.node}/")

    def beside(declaration: Factor, b: Factor) -> bool:
        """Whether it is a declaration, and the other a kind in the part above it or a declaration of another part there."""
        if not declaration.declaration or f"{b.place}={b.value}" == declaration.node:
            return False
        return (
            b.node == declaration.above
            if b.kind
            else b.declaration and b.above == declaration.above and b.node != declaration.node
        )

    def meets(a: Factor, b: Factor) -> bool:
        if a.place == b.place:
            return False
        if beside(a, b) or beside(b, a):
            return True
        if a.kind and b.kind:
            return a.node in (BLOCK, "model") or b.node in (BLOCK, "model") or inside(a, b) or inside(b, a)
        if a.kind or b.kind:
            kind, value = (a, b) if a.kind else (b, a)
            return inside(kind, value) or kind.node == (BLOCK if value.in_block else "model")
        return a.node == b.node or a.node.rpartition("/")[0] == b.node or b.node.rpartition("/")[0] == a.node

    every = all_factors()
    scope = {*random.Random(0).sample(every, 60), *random.Random(1).sample([f for f in every if f.declaration], 30)}
    assert set(meeting(scope)) == {pair for pair in itertools.combinations(sorted(scope), 2) if meets(*pair)}


@pytest.mark.slow
def test_each_value_occurs_or_is_reported_as_impossible(monkeypatch):
    monkeypatch.setattr(cover, "CANDIDATES", 1)
    made = PairCover(0)
    for spec in itertools.islice(made.each_value(), 12):
        assert pairs_of(spec) <= made.covered
    assert len(made.specs) == 12


def test_every_kind_of_a_group_is_a_factor():
    offered = {factor.value for factor in all_factors() if factor.kind}
    # what a layer takes from an earlier one is sampled with both; an adapter and a synthetic task are no parts of a spec
    apart = ("model", "block", "earlier", "adapter", "task")
    missing = {kind for kind, cls in KINDS.items() if cls.group not in apart} - offered
    assert not missing
