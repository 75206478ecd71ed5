"""attach and merge: targets, what is refused, initial values, and rows with adapters of their own."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, InputError, SpecError
from dovetail.proof.laws.adapted import perturb
from dovetail.proof.laws.mutant import spec
from dovetail.weights.adapters.attach import attach, detach, merge, read_adapter
from dovetail.weights.adapters.lora import Dora, Lora
from dovetail.weights.adapters.multi_lora import Bank
from dovetail.weights.adapters.storage import adapter_tensors

IDS = torch.arange(12).view(3, 4)
EXPERTS = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})


def model(of: dt.Model | None = None) -> dt.Transformer:
    return dt.build(of or spec(), dtype="float64")


def test_all_linear_leaves_are_adapted_but_readouts() -> None:
    assert str(attach(model(), "lora")) == "lora: applied 14 of 14, 16,640 trained parameters"
    paths = attach(model(EXPERTS), "lora").paths
    assert "layers.1.ffn.bank.down" in paths
    assert not {path for path in paths if "router" in path or "head" in path}


@pytest.mark.parametrize(
    ("targets", "count"),
    [("q", 2), ("mixer.*", 8), ("layers.0.*", 7), (["q", "head.out"], 3), (["linear", "head.out"], 15), ("*", 15)],
)
def test_targets_are_paths_ends_of_paths_and_roles(targets: object, count: int) -> None:
    assert len(attach(model(), {"kind": "lora", "targets": targets}).paths) == count


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("qq", r"lora\.targets: 'qq' matches no linear leaf \(did you mean q\?\)"),
        ("embed.table", r"embed\.table: is no linear leaf \(its role is embed\)"),
        ("head.out", r"head\.out: is tied to embed\.table"),
        ("*", r"head\.out: is tied to embed\.table"),
        ("layers.1.mixer.q", r"layers\.1\.mixer\.q: uses the weight of layers\.0\.mixer\.q"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_its_path(targets: str, message: str) -> None:
    tied = spec().set("head.tied", True).set("layers.1.shares", 0)
    with pytest.raises(SpecError, match=message):
        attach(model(tied), {"kind": "lora", "targets": targets})


def test_a_second_adapter_and_wrong_fields_are_refused() -> None:
    one = model()
    attach(one, "ia3")
    with pytest.raises(SpecError, match="has an adapter already"):
        attach(one, "lora")
    with pytest.raises(SpecError, match="rank: 0 is not"):
        attach(model(), {"kind": "lora", "rank": 0})
    with pytest.raises(SpecError, match="lora has no such field"):
        attach(model(), {"kind": "lora", "rnk": 2})


def test_initial_factors_are_functions_of_seed_and_path() -> None:
    one, two, other = model(), model(EXPERTS), model()
    attach(one, "lora", seed=3)
    attach(two, "lora", seed=3)
    attach(other, "lora", seed=4)
    a = one.layers[0].mixer.q.adapter.a
    assert torch.equal(a, two.layers[0].mixer.q.adapter.a), "another ffn changes no other adapter"
    assert not torch.equal(a, other.layers[0].mixer.q.adapter.a)
    bound = a.shape[-1] ** -0.5
    assert 0.95 * bound < a.abs().max() <= bound
    assert abs(a.mean()) < 0.1 * bound
    assert not one.layers[0].mixer.q.adapter.b.any()


def test_a_merge_is_undone_bit_for_bit() -> None:
    one = model()
    before = {name: tensor.clone() for name, tensor in one.named_parameters()}
    attach(one, "dora")
    perturb(one, 0)
    want = one(IDS)
    merged = merge(one)
    assert (one(IDS) - want).abs().max() <= 1e-12 * want.abs().max()
    merged.undo()
    assert torch.equal(one(IDS), want)
    detach(one)
    assert all(torch.equal(tensor, before[name]) and tensor.requires_grad for name, tensor in one.named_parameters())


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_merged_and_unmerged_in_float32_are_equally_near_to_float64(kind: str) -> None:
    # a merge rounds W + ΔW to float32 once: the two differ by about 1e-6 of the largest logit over six layers
    one = dt.build("llama-tiny")
    attach(one, kind)
    with torch.no_grad():
        for tensor in adapter_tensors(one).values():
            tensor += 0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        exact = copy.deepcopy(one).double()(IDS)
        unmerged = one(IDS)
        merge(one)
        merged = one(IDS)
    rounding = (unmerged - exact).abs().max()
    assert (merged - exact).abs().max() <= 4 * rounding
    assert (merged - unmerged).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("of", [spec(), EXPERTS], ids=["attention", "experts"])
def test_every_row_has_its_own_adapter_or_none(of: dt.Model) -> None:
    one = model(of)
    plain = one(IDS)
    several, alone = [], []
    for i, kind in enumerate((Lora(rank=2), Lora(rank=3, alpha=5.0, targets=("q",)))):  # other ranks, factors and targets
        attach(one, kind)
        perturb(one, i)
        several.append((kind, {path: tensor.clone() for path, tensor in adapter_tensors(one).items()}))
        alone.append(one(IDS))
        detach(one)
    bank = Bank(one)
    assert torch.equal(one(IDS), plain)
    for name, (kind, tensors) in zip("ab", several, strict=True):
        bank.load(name, kind, tensors)
    with bank.rows(["b", None, "a"]), torch.no_grad():
        got = one(IDS)
    for row, want in enumerate([alone[1], plain, alone[0]]):
        assert (got[row] - want[row]).abs().max() <= 1e-12 * want.abs().max()
    with pytest.raises(InputError, match="which adapter has each row"):
        one(IDS)
    with pytest.raises(InputError, match="is given 3 rows, and the index has 2"), bank.rows(["a", "b"]):
        one(IDS)
    with pytest.raises(InputError, match="'c' is not loaded; adapters: a, b"), bank.rows(["a", "c", "b"]):
        pass
    with pytest.raises(InputError, match="'a' is loaded already"):
        bank.load("a", *several[0])
    with pytest.raises(SpecError, match="only with lora"):
        bank.load("c", Dora(rank=2), {})
    with pytest.raises(FileError, match="has shape"):  # and the others stay as they are
        bank.load("c", Lora(rank=2), several[1][1])
    bank.unload("a")
    with bank.rows(["b", None, "b"]), torch.no_grad():
        again = one(IDS)
    assert (again[:2] - got[:2]).abs().max() <= 1e-12 * got.abs().max()
    bank.unload("b")
    assert torch.equal(one(IDS), plain)


@pytest.mark.slow
def test_a_compiled_model_uses_an_adapter_attached_later() -> None:
    one = model()
    compiled = torch.compile(one, backend="eager")
    with torch.no_grad():
        compiled(IDS)
        attach(one, "lora")
        perturb(one, 0)
        want = one(IDS)
        assert (compiled(IDS) - want).abs().max() <= 1e-12 * want.abs().max()


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    ("field", "value"), [("rank", 0), ("rank", 2**31), ("alpha", 0.0), ("alpha", math.inf), ("alpha", 1e30)]
)
def test_an_impossible_number_is_refused(kind: str, field: str, value: float) -> None:
    with pytest.raises(SpecError, match=field):
        read_adapter({"kind": kind, field: value})
