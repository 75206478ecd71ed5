"""Muon against torch's, its polynomial on singular values, every matrix of a weight alone; which weights are whose."""

from math import sqrt

import pytest
import torch

from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.spec.fold import declared
from dovetail.spec.weight import matrices
from dovetail.training.optim import A, B, C, Muon, Optimizer, by_muon, orthogonal

SPEC = """
width: 24
vocab: 40
head: {kind: lm, tied: false}
layers:
  - mixer: {kind: attention, heads: 6, kv_heads: 2, head: 10, packed: true}
    ffn: {kind: glu, hidden: 52}
  - mixer: {kind: mamba, inner: 30, state_size: 5}
    ffn: {kind: moe, experts: 3, hidden: 14, router: {kind: softmax_router, top_k: 2}}
"""


def test_orthogonal_maps_each_singular_value_by_the_polynomial() -> None:
    x = torch.randn(2, 7, 11, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    want = u @ torch.diag_embed(s) @ v
    assert (orthogonal(x) - want).abs().max() < 1e-12
    assert (orthogonal(x.mT) - want.mT).abs().max() < 1e-12
    assert s.min() > 0.6
    assert s.max() < 1.2
    assert orthogonal(torch.zeros(3, 4)).abs().max() == 0


@pytest.mark.parametrize("shape", [(20, 34), (34, 20)])
def test_a_matrix_takes_the_steps_of_torch_optim_muon(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's always orthogonalizes in bfloat16
    spec = from_yaml(SPEC)
    d = next(d for d in declared(spec) if d.path == "layers.0.ffn.up.weight")
    ours = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    theirs = torch.nn.Parameter(ours.detach().clone())
    group = {"params": [ours], "declared": [d], "scale": 1.0}
    mine = Muon([group], lr=0.01, momentum=0.9, weight_decay=0.2)
    torchs = torch.optim.Muon([theirs], lr=0.01, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
    assert (theirs - ours).abs().max() < 1e-12


def test_every_expert_and_each_of_q_k_v_is_a_matrix_of_its_own() -> None:
    model = build(from_yaml(SPEC), dtype=torch.float64)
    before = {path: weight.detach().clone() for path, weight in model.named_parameters()}
    optimizer = Optimizer(model, "muon", weight_decay=0.0)
    gradients = {path: torch.randn_like(weight) for path, weight in model.named_parameters()}
    for path, weight in model.named_parameters():
        weight.grad = gradients[path].clone()
    optimizer.set_lr(0.1)
    optimizer.step()
    after = dict(model.named_parameters())

    def step(gradient: torch.Tensor) -> torch.Tensor:
        return -0.1 * 0.2 * sqrt(max(gradient.shape)) * orthogonal(gradient)

    for name in ("gate", "up", "down"):
        path = next(path for path in before if path.startswith("layers.1.ffn.") and name in path and before[path].dim() == 3)
        for e in range(3):
            moved = after[path][e] - before[path][e]
            assert (moved - step(gradients[path][e])).abs().max() < 1e-12
    packed = "layers.0.mixer.qkv.weight"
    moved = (after[packed] - before[packed]).view(2, 5, 10, 24)
    gradient = gradients[packed].view(2, 5, 10, 24)
    for rows in (slice(0, 3), slice(3, 4), slice(4, 5)):
        want = step(gradient[:, rows].reshape(-1, 24))
        assert (moved[:, rows].reshape(-1, 24) - want).abs().max() < 1e-12


def test_the_spec_says_which_weights_are_muons() -> None:
    spec = from_yaml(SPEC)
    muon = {d.path for d in declared(spec) if d.weight.learned and by_muon(d)}
    assert {"layers.0.mixer.qkv.weight", "layers.0.ffn.down.weight", "layers.1.mixer.o.weight"} <= muon
    assert not {
        path for path in muon if path.startswith(("embed", "head")) or "norm" in path or "conv" in path or "a_log" in path
    }
    model = build(spec)
    optimizer = Optimizer(model, "muon")
    adamw, muons = ({id(weight) for group in part.param_groups for weight in group["params"]} for part in optimizer.parts)
    assert not adamw & muons
    assert adamw | muons == {id(weight) for weight in model.parameters()}
    assert len(muons) == len(muon)


def test_mup_scales_learning_rates_by_inputs() -> None:
    model = build(from_yaml(SPEC + "init: {kind: mup, base_width: 6}\n"))
    for kind, power in (("adamw", 1.0), ("muon", 0.5)):
        optimizer = Optimizer(model, kind)  # pyright: ignore[reportArgumentType]
        optimizer.set_lr(2.0)
        rates = {d.path: group["lr"] for part in optimizer.parts for group in part.param_groups for d in group["declared"]}
        assert rates["embed.table"] == 2.0
        assert rates["head.out.weight"] == 2.0 * 6 / 24
        assert rates["layers.0.ffn.down.weight"] == pytest.approx(2.0 * (6 / 52) ** power)
        assert rates["layers.0.mixer_norm.scale"] == 2.0


def test_state_can_be_allocated_before_the_first_step() -> None:
    model = build(from_yaml(SPEC))
    first, second = Optimizer(model, "muon"), Optimizer(model, "muon")
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    first.step()
    one, two = first.state(), second.state()
    assert {name: tensor.shape for name, tensor in one.items()} == {name: tensor.shape for name, tensor in two.items()}
    assert {name: tensor.dtype for name, tensor in one.items()} == {name: tensor.dtype for name, tensor in two.items()}
    assert matrices(
        torch.zeros(100, 24),
        next(d for d in declared(model.part) if d.weight.packs).weight,
        next(d for d in declared(model.part) if d.weight.packs).scope,
    )[0].shape == (2, 3, 10, 24)
