"""Joined leaves: where they are multiplied at once, and where each leaf is called."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.nn.fused import fuse
from dovetail.proof.laws.mutant import spec

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def calls(model) -> int:
    """How often `q` and `gate` of the first layer are called by themselves in one forward pass."""
    found: list[str] = []
    for leaf in (model.layers[0].mixer.q, model.layers[0].ffn.gate):
        own = leaf.forward
        leaf.forward = lambda x, ctx, own=own: found.append("") or own(x, ctx)
    model(IDS)
    for leaf in (model.layers[0].mixer.q, model.layers[0].ffn.gate):
        del leaf.forward
    return len(found)


@torch.no_grad()
def test_joined_leaves_are_views_and_give_the_same_logits(tmp_path: Path) -> None:
    model = dt.build(spec())
    want, before = model(IDS), {name: p.clone() for name, p in model.state_dict().items()}
    assert fuse(model) == 2 * (3 + 2)
    assert calls(model) == 0
    torch.testing.assert_close(model(IDS), want)
    mixer = model.layers[0].mixer
    assert mixer.q.weight.untyped_storage().data_ptr() == mixer.v.weight.untyped_storage().data_ptr()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    dt.save(model, tmp_path / "model")
    torch.testing.assert_close(dt.load(tmp_path / "model")(IDS), want)


def test_a_gradient_reaches_joined_leaves() -> None:
    model = dt.build(spec())
    fuse(model)
    assert calls(model) == 2
    model.loss(IDS).backward()
    assert model.layers[0].mixer.k.weight.grad.abs().sum() > 0
    with torch.no_grad():  # an optimizer's step in place is seen by the joined product
        for p in model.parameters():
            p.sub_(0.1 * p.grad)
        apart = copy.deepcopy(model)
        assert calls(apart) == 2
        torch.testing.assert_close(model(IDS), apart(IDS))


@pytest.mark.parametrize("change", ["cast", "copy", "hook", "assigned"])
@torch.no_grad()
def test_leaves_are_called_where_they_are_no_longer_joined(change: str) -> None:
    model = dt.build(spec())
    fuse(model)
    if change == "cast":
        model.bfloat16().float()
    elif change == "copy":
        model = copy.deepcopy(model)
    elif change == "hook":
        for name in ("mixer.k", "ffn.up"):
            model.layers[0].get_submodule(name).register_forward_hook(lambda *_: None)
    else:
        model.load_state_dict({name: p + 0.5 for name, p in model.state_dict().items()}, assign=True)
    assert calls(model) == 2


@torch.no_grad()
def test_a_bias_is_joined_too() -> None:
    model = dt.build(spec(bias=True).set("layers.*.ffn.bias", True))
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.1)
    want = model(IDS)
    assert fuse(model) == 10
    assert calls(model) == 0
    torch.testing.assert_close(model(IDS), want)


def test_leaves_that_are_joined_stay_where_they_are() -> None:
    model = dt.build("llama-tiny")
    joined = fuse(model)
    places = [weight.data_ptr() for weight in model.parameters()]
    assert fuse(model) == joined  # a second decoder: the graphs of the first hold these weights
    assert [weight.data_ptr() for weight in model.parameters()] == places
