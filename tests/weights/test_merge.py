"""dovetail merge: one adapter equals the adapted model; several are combined as the papers say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import UsageError
from dovetail.cli import main
from dovetail.proof.laws.adapted import perturb
from dovetail.weights.adapters.lora import combine

SPEC = "{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1, bias: true}, ffn: {hidden: 44}}]}"
IDS = torch.arange(10)[None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, `base`, and adapters of it."""
    place = tmp_path_factory.mktemp("merge")
    dt.save(dt.build(SPEC, dtype="float64", seed=2), place / "base")
    for i, kind in enumerate(("lora", "dora", "ia3")):
        model = dt.load(place / "base")
        dt.attach(model, kind)
        perturb(model, i)
        dt.save_adapter(model, place / kind, base=place / "base")
    return place


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_a_merged_model_computes_what_the_adapted_one_does(home: Path, tmp_path: Path, kind: str) -> None:
    merged = dt.merge(home / "base", home / kind, out=tmp_path / "out")
    want = dt.load(home / "base", adapter=home / kind)(IDS)
    assert (dt.load(tmp_path / "out")(IDS) - want).abs().max() <= 1e-12 * want.abs().max()
    assert merged.leaves == {"lora": 14, "dora": 14, "ia3": 6}[kind]


def test_the_command_merges_several(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["merge", str(home / "base"), str(home / "lora"), str(home / "ia3"), "-o", str(tmp_path / "out"), "--json"])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)["leaves"] == 14
    base, out = dt.load(home / "base"), dt.load(tmp_path / "out")
    alone = [dt.merge(home / "base", home / kind).model for kind in ("lora", "ia3")]
    for name, weight in base.named_parameters():
        want = weight + sum(dict(one.named_parameters())[name] - weight for one in alone)
        assert (dict(out.named_parameters())[name] - want).abs().max() <= 1e-12


def test_an_adapter_directory_is_merged_into_the_base_it_names(home: Path) -> None:
    assert torch.equal(dt.merge(home / "lora").model(IDS), dt.merge(home / "base", home / "lora").model(IDS))


def test_ties_by_hand() -> None:
    a, b = torch.tensor([4.0, -1.0, 3.0, 0.1]), torch.tensor([2.0, 5.0, -6.0, 0.2])
    # kept: [4, 0, 3, 0] and [0, 5, -6, 0]; signs elected: +, +, −; means of what agrees
    assert combine([a, b], [1.0, 1.0], "ties", 0.5).tolist() == [4.0, 5.0, -6.0, 0.0]
    assert combine([a, b], [1.0, 1.0], "ties", 1.0).tolist() == pytest.approx([3.0, 5.0, -6.0, 0.15])


def test_dare_keeps_the_mean_and_draws_by_the_seed() -> None:
    change = torch.ones(100, 200)
    one = combine([change], [1.0], "dare", 0.25, seed=1, path="q")
    assert set(one.unique().tolist()) == {0.0, 4.0}
    assert one.mean().item() == pytest.approx(1.0, abs=0.06)
    assert torch.equal(one, combine([change], [1.0], "dare", 0.25, seed=1, path="q"))
    assert not torch.equal(one, combine([change], [1.0], "dare", 0.25, seed=2, path="q"))


def test_what_cannot_be_merged_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="weights: 1 factors for 2 adapters"):
        dt.merge(home / "base", home / "lora", home / "ia3", weights=[1.0])
    with pytest.raises(UsageError, match="give the adapter directories"):
        dt.merge(home / "base")
    with pytest.raises(UsageError, match=r"density: 0 is not in \(0, 1\]"):
        dt.merge(home / "base", home / "lora", method="ties", density=0)
