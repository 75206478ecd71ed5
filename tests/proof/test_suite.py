"""The suite: what it counts, what is a failure, and a few laws on real specs."""

import pytest

from dovetail.files.spec import from_yaml, load_spec, to_yaml
from dovetail.proof.laws import suite
from dovetail.proof.laws.case import LAWS, Broken, Case, NotApplicable
from dovetail.proof.laws.law import Outcome
from dovetail.proof.laws.suite import Report, exceptions, try_spec

TINY = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""
CHEAP = [law.name for law in LAWS.values() if not law.slow]


def test_every_law_of_this_release_is_registered():
    assert {law.number for law in LAWS.values()} | {14} >= {*range(1, 9), *range(10, 18), 19}


@pytest.mark.slow
def test_fast_laws_hold_for_a_small_llama():
    states = {outcome.law: (outcome.state, outcome.detail) for outcome in try_spec(TINY, CHEAP)}
    assert states.pop("drafted")[0] == "not applicable"
    assert all(state == "passed" for state, _ in states.values()), states


def test_ported_holds_where_hugging_face_can_express_the_spec():
    (outcome,) = try_spec(TINY.replace("width: 28", "width: 30"), ["ported"])
    assert outcome.state == "passed", outcome.detail


def test_a_declared_exception_is_tested_and_fails():
    spec = from_yaml(TINY).set("layers.*.mixer.position", {"kind": "rope", "scaling": {"kind": "dynamic_ntk", "original": 8}})
    declared = exceptions(spec)
    assert set(declared) == {"chunked", "rollback", "programs", "positions"}  # the last two: they step in chunks
    for law in ("chunked", "programs"):
        assert LAWS.test(law, Case(spec), declared[law]).state == "excepted"


def test_an_exception_that_always_holds_is_a_failure():
    report = Report()
    for _ in range(suite.ENOUGH):
        report.take("a spec", Outcome("chunked", "excepted but held", exceptions=[("rope", "says so")]))
    assert [failure["law"] for failure in report.end(1.0).failures] == ["chunked"]
    shown = Report()
    shown.take("a spec", Outcome("chunked", "excepted but held", exceptions=[("rope", "says so")]))
    shown.take("another", Outcome("chunked", "excepted", exceptions=[("rope", "says so")]))
    assert not shown.end(1.0).failures


def test_a_law_that_compares_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    import dataclasses

    monkeypatch.setitem(LAWS, "causal", dataclasses.replace(LAWS["causal"], check=lambda case: None))
    assert LAWS.test("causal", Case(from_yaml(TINY))).state == "failed"


def test_not_applicable_is_counted_separately():
    report = Report()
    report.take("a spec", Outcome("causal", "not applicable"))
    report.take("a spec", Outcome("causal", "passed"))
    assert (report.total("cells"), report.total("not_applicable")) == (1, 1)


def test_same_refuses_shapes_and_numbers_that_are_none():
    import torch

    case = Case(from_yaml(TINY))
    with pytest.raises(Broken, match="shapes"):
        case.same(torch.zeros(2), torch.zeros(3), "x")
    with pytest.raises(Broken, match="differ"):
        case.same(torch.tensor([torch.nan]), torch.tensor([1.0]), "x")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "bert-tiny", "t5-tiny", "vit-tiny"])
def test_laws_hold_for_presets(name: str):
    outcomes = try_spec(to_yaml(load_spec(name)), [law for law in CHEAP if law != "every_field"])
    assert not [outcome for outcome in outcomes if outcome.state == "failed"]


def test_not_applicable_says_why():
    with pytest.raises(NotApplicable, match="decoder"):
        LAWS["chunked"].check(Case(from_yaml(TINY).set("layers.*.mixer.mask", "full")))


def test_a_law_over_its_budget_is_reported():
    report = Report()
    report.take("a spec", Outcome("causal", "held", seconds=LAWS["causal"].budget + 1))
    report.take("a spec", Outcome("padded", "held", seconds=LAWS["padded"].budget / 2))
    assert report.data()["over_budget"] == {"causal": {"seconds_per_spec": LAWS["causal"].budget + 1, "budget": 0.5}}
