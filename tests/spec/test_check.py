"""Errors before any tensor is allocated, each with its path; advice, which is never an error."""

from __future__ import annotations

import pytest

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.spec.check import advice, check, problems
from dovetail.spec.part import KINDS

SEQ2SEQ = """
width: 28
vocab: 62
encoder: {width: 24, vocab: 62, head: null, layers: [{mixer: {heads: 2, mask: full}}]}
layers: [{mixer: {heads: 2}, cross: {kind: cross_attention, heads: 2}}]
"""


def model(**mixer: object) -> Model:
    spec = from_yaml("width: 28\nvocab: 62\nlayers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}}]")
    for name, value in mixer.items():
        spec = spec.set(f"layers.*.mixer.{name}", value)
    return spec


@pytest.mark.parametrize(
    ("spec", "path", "problem"),
    [
        (model(kv_heads=4), "layers.0.mixer.kv_heads", "4 does not divide 6 heads"),
        (model(head=None), "layers.0.mixer.heads", "6 does not divide the width, 28"),
        (model(position="learned"), "layers.0.mixer.position", "learned acts on the residual stream"),
        (model(softcap=0.0), "layers.0.mixer.softcap", "0.0 is not above 0"),
        (model(dropout=1.0), "layers.0.mixer.dropout", "1.0 is not in [0, 1)"),
        (model(qk_norm_whole=True), "layers.0.mixer.qk_norm_whole", "there is no qk_norm"),
        (model(mask={"kind": "window", "size": 0}), "layers.0.mixer.mask.size", "0 is not above 0"),
        (model().set("width", 0), "width", "0 is not above 0"),
        (model().set("position", "rope"), "position", "rope acts inside attention"),
        (model().replace("layers", ()), "layers", "there are none"),
        (model().set("layers.1.cross", "attention"), "layers.1.cross", "there is no encoder"),
        (model().set("layers.1.cross", "cross_attention"), "layers.1.cross", "there is no encoder"),
        (from_yaml(SEQ2SEQ).replace("layers.0.cross", None), "encoder", "no layer reads it"),
        (from_yaml(SEQ2SEQ).set("encoder.head", "lm"), "encoder.head", "an encoder that feeds a decoder has no head"),
        (from_yaml(SEQ2SEQ).set("layers.0.cross.packed", True), "layers.0.cross.packed", "q is projected from x"),
        (from_yaml(SEQ2SEQ).set("layers.0.cross.position", "rope"), "layers.0.cross.position", "share no order"),
    ],
)
def test_illegal_specs_raise_before_they_are_built(spec: Model, path: str, problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        build(spec, device="meta")
    assert refused.value.path == path
    assert problem in refused.value.problem


def test_errors_of_a_parent_come_before_those_of_its_children() -> None:
    found = problems(model(kv_heads=4).set("width", -1))
    assert [path for path, _ in found] == ["width"]


def test_several_problems_of_one_part_are_counted() -> None:
    with pytest.raises(SpecError, match="and 5 more"):
        check(model(softcap=-1.0, dropout=2.0))


def test_a_weight_cannot_be_the_same_as_one_of_another_shape() -> None:
    spec = model().set("layers.*.mixer.position", "t5_bias").set("layers.1.mixer.position.buckets", 12)
    with pytest.raises(
        SpecError,
        match=r"position\.table: is tied to layers\.0\.mixer\.position\.table, which has shape \(6, 32\), not \(6, 12\)",
    ):
        check(spec)


def test_sound_specs_pass() -> None:
    assert problems(model()) == problems(from_yaml(SEQ2SEQ)) == []


def test_advice_is_no_error_and_is_listed_once() -> None:
    spec = model()  # heads of 12, in three layers alike
    said = [(path, problem.problem) for path, problem in advice(spec) if problem.field == "head"]
    assert said == [("layers.0.mixer.head", "a head of 12 is outside the usual 32 to 128")]
    build(spec, device="meta")


def test_advice_depends_on_the_length() -> None:
    spec = load_spec("llama-tiny").swap("position", KINDS["learned"](length=64))
    assert not advice(spec, length=64)
    ((path, problem),) = advice(spec, length=65)
    assert path == "position.length"
    assert "fewer than 65 tokens" in problem.problem
    assert "rope" in problem.remedy
