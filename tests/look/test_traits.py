"""Traits: planted ones are found, with an intervention each that runs. All models: benchmarks/look_traits.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny import IDS, MIXED, MODEL
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import InputError
from dovetail.files.spec import from_yaml
from dovetail.look.findings import traits
from dovetail.look.judging import THRESHOLDS
from dovetail.look.relations import head_traits
from dovetail.proof.laws.case import perturbed

FIRST = 14 * 142  # a seed whose trait is the first; the thresholds were set on others
DRAWS = 19
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import look_traits  # pyright: ignore[reportMissingImports]

    return look_traits


def test_every_kind_is_planted(planted: ModuleType) -> None:
    assert set(planted.PLANTS) == set(THRESHOLDS) - {"next-token", "last-token"}  # of models that see later tokens


@pytest.mark.parametrize("seed", [FIRST + i for i in (2, 5, 12)])
def test_a_planted_trait_is_found_and_its_intervention_runs(planted: ModuleType, seed: int) -> None:
    case, ids = planted.planted(seed), planted.text(seed)
    findings = traits(case.model, ids, draws=DRAWS)
    assert planted.found(case, findings), (case.name, case.address, findings)
    for finding in findings:
        effect = eval(finding.test, {"dt": dt, "model": case.model, "ids": ids})
        if finding.name == "uniform" and finding.score > 1 - 1e-6:  # made uniform, it is what it was
            assert effect.change < 1e-6, finding
        else:
            assert (effect.change < 1e-7) == finding.name.startswith("dead"), finding  # to rounding
    if case.name == "dead-neurons":
        assert traits(case.model, ids, draws=DRAWS) == findings  # a function of the seed


@pytest.mark.slow
@pytest.mark.parametrize("i", range(14))
def test_every_planted_trait_is_found(planted: ModuleType, i: int) -> None:
    test_a_planted_trait_is_found_and_its_intervention_runs(planted, FIRST + i)


def test_the_repeated_text_is_a_function_of_the_seed() -> None:
    again = dt.look.repeated(IDS.repeat(1, 3))
    assert again.shape == (8, 27)
    assert torch.equal(again, dt.look.repeated(IDS.repeat(1, 3)))


def test_random_models_have_no_traits(planted: ModuleType) -> None:
    for model in (planted.clean(2001), MIXED):
        findings = traits(model, planted.text(1), draws=DRAWS)
        assert not findings
        assert findings.checked["previous-token"] > 0
        assert repr(findings) == "no traits found"


def test_spans_are_told_from_a_fixed_distance(planted: ModuleType) -> None:
    """A previous-token head explains no relation whose pairs are neighbours; a head that attends to the right token does."""
    ids, before = planted.text(1), planted.base(3)
    planted.offset(1)(before, 1, 2)
    neighbours = [(row, query, query - 1) for row in range(8) for query in (10, 20, 30)]
    assert "subject" not in {finding.name for finding in traits(before, ids, spans={"subject": neighbours}, draws=DRAWS)}
    matches = planted.base(4)
    planted.matching(matches, 1, 2)
    twice = ids.clone()
    pairs = [(row, 30 + row, 5 + 3 * row) for row in range(8)]
    for row, query, key in pairs:
        twice[row] = torch.where(twice[row] == 59, 0, twice[row])
        twice[row, query] = twice[row, key] = 59
    found = [f for f in traits(matches, twice, spans={"coreference": pairs}, draws=DRAWS) if f.name == "coreference"]
    assert [f.address for f in found] == ["layers.1.mixer.pattern[head=2]"]


@pytest.mark.parametrize(
    ("tokens", "spans", "message"),
    [
        (IDS[:, :6], {}, "rows differ at"),
        (IDS[0], {}, "give ids"),
        (torch.arange(48).reshape(1, 48), {"subject": [(0, 5, 3)]}, "at least 8"),
        (torch.arange(48).reshape(1, 48), {"subject": [(0, 5, 9)] * 8}, "sees no later tokens"),
        (torch.arange(48).reshape(1, 48), {"subject": [(1, 5, 3)] * 8}, "outside of the 1 rows"),
    ],
)
def test_what_cannot_be_tested_is_refused(tokens: Tensor, spans: dict[str, list[tuple[int, int, int]]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        traits(MODEL, tokens, spans=spans)


def test_relations_are_those_of_their_names() -> None:
    ids = torch.tensor([[7, 1, 2, 3, 1, 2, 9, 4, 5, 6, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18]])
    again, relations = head_traits(ids, True, {}, 0)
    assert again.shape == (8, 20)
    for row, query, key in relations["induction"].relation.triples.tolist():
        assert again[row, key - 1] == again[row, query]
        assert key < query
    for row, query, key in relations["duplicate-token"].relation.triples.tolist():
        assert again[row, key] == again[row, query]
    pattern = torch.zeros(1, 2, 20, 20)
    pattern[:, 0] = torch.eye(20).roll(-1, -1)
    assert relations["previous-token"].relation.mass(pattern).tolist() == [1.0, 0.0]
    null = relations["previous-token"].null(torch.Generator().manual_seed(0))
    assert not (null.triples[:, 2] == null.triples[:, 1] - 1).any()
    assert (null.triples[:, 2] <= null.triples[:, 1]).all()


def test_a_head_of_a_scan_that_attends_to_the_first_token_is_found(planted: ModuleType) -> None:
    """Linear attention has no softmax: its effective attention has the trait. Without it, no head has one."""
    spec = "{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {kind: linear_attention, heads: 4}, ffn: {hidden: 44}}]}"
    model, ids = perturbed(from_yaml(spec)), planted.text(1).clone()
    ids[ids == 61] = 60
    ids[:, 0] = 61
    assert [f.name for f in traits(model, ids, draws=DRAWS) if "mixer" in f.address] == []
    with torch.no_grad():
        model.embed.table[:, 0] = 0
        model.embed.table[61, 0] = 9
        model.layers[1].mixer.k.weight[7:14, 0] = 40  # the keys of head 1, of the first token alone
    findings = traits(model, ids, draws=DRAWS)
    assert [(f.name, f.address) for f in findings if "mixer" in f.address] == [
        ("first-token", "layers.1.mixer.pattern[head=1]")
    ]
    (test,) = {f.test for f in findings if "mixer" in f.address}
    assert test == "dt.look.effect(model, ids, 'layers.1.mixer.y[head=1]')"
    assert eval(test, {"dt": dt, "model": model, "ids": ids}).change > 0
    assert (
        "attention by head"
        in traits(perturbed(from_yaml(spec.replace("linear_attention, heads: 4", "s4"))), ids).skipped["heads"]
    )
