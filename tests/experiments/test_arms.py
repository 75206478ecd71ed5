"""The design of a lab and its arms: what is read, what is refused, and what matching makes equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lab_designs import lab

from dovetail.base.errors import FileError, SpecError
from dovetail.disk.yaml import dump_yaml
from dovetail.experiments.arms import build_arms
from dovetail.experiments.design import MATCHES, Tuning, read_design
from dovetail.weights.surgery.budget import BUDGETS

ROOT = Path(__file__).parents[2]


def test_a_file_and_a_mapping_are_one_design(tmp_path: Path) -> None:
    data = lab(match="params", tune={"learning_rate": [1e-3, 1e-1], "trials": 3}, seeds={"at_least": 3}, smallest=0.02)
    path = tmp_path / "lab.yaml"
    path.write_text(dump_yaml(data), encoding="utf-8")
    design = read_design(path)
    assert design == read_design(data)
    assert (design.budget, design.at_least, design.at_most, design.smallest) == ({"tokens": 2000}, 3, 30, 0.02)
    assert design.tune == Tuning(1e-3, 1e-1, 3)
    assert design.tune.rates == (1e-3, 1e-2, 1e-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": {}}, "lab: arm: is not a key; did you mean arms?"),
        ({"arms": {}}, "lab: arms: 0 arms"),
        ({"arms": {"a": {"sett": {}}}}, r"lab: arms.a.sett: is not a key; did you mean set\?"),
        ({"arms": {"a": {"on": "b"}, "b": {}}}, "lab: arms.a.on: 'b' is not an arm above it"),
        ({"arms": {"a": {"train": {"seed": 3}}}}, "lab: arms.a.train.seed: is set by the lab"),
        ({"arms": {"../x": {}}}, "is not a name"),
        ({"budget": {"minutes": 3}}, "lab: budget.minutes: is not a key"),
        ({"budget": {"tokens": "many"}}, "lab: budget.tokens: 'many' is not a count"),
        ({"match": "speed"}, "lab: match: 'speed' is not a cost"),
        ({"metric": "los"}, "lab: metric: 'los' is not measured; did you mean val_loss or train_loss"),
        ({"seeds": {"at_least": 9, "at_most": 5}}, "lab: seeds.at_most: 5 is not a whole number from 9"),
        ({"tune": {"learning_rate": [1e-2, 1e-3], "trials": 3}}, "lab: tune.learning_rate: 0.01 is not below 0.001"),
        ({"smallest": -1}, "lab: smallest: -1 is not a number from 0"),
    ],
)
def test_what_a_design_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_design(lab(**change))


def test_a_missing_key_is_named() -> None:
    data = lab()
    del data["budget"]
    with pytest.raises(FileError, match="lab: budget is missing"):
        read_design(data)


def test_arms_are_changes_of_the_base_and_of_each_other() -> None:
    arms = {
        "gqa": {"set": {"layers.*.mixer.kv_heads": 2}},
        "mla": {"on": "gqa", "swap": {"mixer": "mla"}},
        "hybrid": {
            "swap": {"layers.1::2.mixer": {"kind": "mamba2", "head": 8, "state_size": 8}},
            "train": {"optimizer": "muon"},
        },
    }
    found = build_arms(read_design(lab(arms=arms)))
    assert [(arm.name, arm.on) for arm in found.values()] == [
        ("base", None),
        ("gqa", "base"),
        ("mla", "gqa"),
        ("hybrid", "base"),
    ]
    assert [block.mixer.kind for block in found["hybrid"].spec.layers] == ["attention", "mamba2"] * 2
    assert found["gqa"].changes == (("layers.*.mixer.kv_heads", "4", "2"),)
    assert ("train.optimizer", "default", "muon") in found["hybrid"].changes
    assert found["hybrid"].train == {"length": 32, "optimizer": "muon"}
    assert found["gqa"].costs.decode_state * 2 == found["base"].costs.decode_state


@pytest.mark.parametrize("match", ["params", "flops"])
def test_costs_are_made_equal_by_a_field_that_the_arm_does_not_change(match: str) -> None:
    arms = build_arms(read_design(lab(match=match)))
    by = {"params": "params", "flops": "flops"}[match]
    costs = {name: BUDGETS[by](arm.spec, 32) for name, arm in arms.items()}
    assert all(abs(cost - costs["base"]) <= 0.01 * costs["base"] for cost in costs.values())
    assert {block.mixer.kv_heads for block in arms["gqa"].spec.layers} == {2}
    assert arms["gqa"].solved.startswith("layers.*.ffn.hidden 40 → ")
    assert arms["mamba2"].solved.startswith(("layers.*.ffn", "width"))


def test_an_arm_that_cannot_be_matched_is_refused() -> None:
    with pytest.raises(SpecError, match=r"arms\.gqa: no field outside its changes brings decode_state within 1%"):
        build_arms(read_design(lab(match="decode_state", arms={"gqa": {"set": {"layers.*.mixer.kv_heads": 1}}})))


def test_vary_names_the_field() -> None:
    arms = {"gqa": {"set": {"layers.*.mixer.kv_heads": 2}, "vary": "layers.*.mixer.kv_heads"}}
    found = build_arms(read_design(lab(match="params", arms=arms)))
    assert found["gqa"].solved == "layers.*.mixer.kv_heads 2 → 4"


def test_an_error_in_a_change_names_the_arm() -> None:
    with pytest.raises(SpecError, match=r"arms\.a: layers\.\*\.mixer\.head_count"):
        build_arms(read_design(lab(arms={"a": {"set": {"layers.*.mixer.head_count": 2}}})))


@pytest.mark.parametrize("name", ["positions", "staircase", "hybrid", "muon"])
def test_the_labs_of_the_docs_have_arms_of_equal_cost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    design = read_design(f"docs/labs/{name}.yaml")
    base, *arms = build_arms(design).values()
    assert 450_000 < base.costs.parameters < 550_000
    assert arms
    if design.match is not None:
        costs = [BUDGETS[MATCHES[design.match]](arm.spec, 128) for arm in (base, *arms)]
        assert max(costs) <= 1.02 * min(costs)


def test_an_arm_that_learns_another_task_is_refused() -> None:
    arms = {"local": {"set": {"layers.*.mixer.mask": [{"kind": "window", "size": 8}]}}}
    with pytest.raises(SpecError, match=r"arms\.local: is trained by masked_tokens and base by next_token, whose val_loss"):
        build_arms(read_design(lab(arms=arms)))
    probed = lab(arms=arms, metric="probe_accuracy", probe={"tasks": ["needle"], "lengths": [64]})
    assert set(build_arms(read_design(probed))) == {"base", "local"}
