"""Ctx: dropout as a function of (seed, path, index), and taps that are silent where no one listens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.construction import build
from dovetail.core.ctx import Ctx, Listener, drop
from dovetail.core.layout import TokenLayout
from dovetail.io.spec import from_yaml

SPEC = from_yaml("""
width: 28
vocab: 62
dropout: 0.2
layers:
  - {repeat: 2, wire: {dropout: 0.2}, mixer: {heads: 6, kv_heads: 2, head: 12, dropout: 0.2}, ffn: {hidden: 44, dropout: 0.2}}
""")
TOKENS = torch.arange(21).reshape(3, 7)


def dropped(seed: int, path: str, p: float = 0.3, n: int = 100_000) -> Tensor:
    return drop(torch.ones(n, dtype=torch.float64), p, seed, path)


def test_the_same_draw_every_time_and_another_for_another_seed_or_path() -> None:
    first = dropped(1, "layers.0.mixer")
    assert torch.equal(first, dropped(1, "layers.0.mixer"))
    for seed, path in ((2, "layers.0.mixer"), (1, "layers.1.mixer")):
        agree = ((first > 0) == (dropped(seed, path) > 0)).double().mean().item()
        assert agree == pytest.approx(0.7**2 + 0.3**2, abs=0.01)  # as two draws that know nothing of each other


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_p_and_the_mean_stays(p: float) -> None:
    x = dropped(3, "here", p)
    assert (x == 0).double().mean().item() == pytest.approx(p, abs=0.01)
    assert x.mean().item() == pytest.approx(1.0, abs=0.03)
    assert set(x.unique().tolist()) == {0.0, 1.0 / (1.0 - p)}


def test_neighbors_are_dropped_independently() -> None:
    kept = (dropped(5, "here", 0.5) > 0).double()
    for lag in (1, 2, 28, 128):
        both = (kept[lag:] * kept[:-lag]).mean().item()
        assert both == pytest.approx(0.25, abs=0.01)


def test_dropout_is_drawn_in_training_alone_and_can_be_drawn_again() -> None:
    model = build(SPEC)
    layout = TokenLayout.whole(3, 7)
    evaluated, again = (model(TOKENS, Ctx(layout=layout)) for _ in range(2))
    trained, replayed, other = (model(TOKENS, Ctx(layout=TokenLayout.whole(3, 7), seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(evaluated, again)
    assert torch.equal(trained, replayed)
    assert not torch.equal(trained, evaluated)
    assert not torch.equal(trained, other)
    assert not Ctx(layout=layout).training
    assert Ctx(layout=layout, seed=0).training  # a seed of 0 is a seed


def test_the_draw_is_the_same_when_compiled() -> None:
    torch.compiler.reset()
    x = torch.ones(6, 50)
    compiled = torch.compile(lambda x: drop(x, 0.3, 7, "layers.0.ffn"), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), drop(x, 0.3, 7, "layers.0.ffn"))


def test_a_listener_sees_addresses_and_may_answer() -> None:
    model, heard = build(SPEC), []
    plain = model(TOKENS, Ctx(layout=TokenLayout.whole(3, 7)))
    listener = Listener({"layers.*.mixer.out": lambda address, x: heard.append((address, tuple(x.shape)))})
    assert torch.equal(model(TOKENS, Ctx(layout=TokenLayout.whole(3, 7), listen=listener)), plain)
    assert heard == [("layers.0.mixer.out", (3, 7, 28)), ("layers.1.mixer.out", (3, 7, 28))]
    silenced = model(
        TOKENS, Ctx(layout=TokenLayout.whole(3, 7), listen=Listener({"*.mixer_add": lambda _, x: torch.zeros_like(x)}))
    )
    assert not torch.equal(silenced, plain)


def test_without_ranks_a_total_is_the_thing_itself() -> None:
    ctx, x = Ctx(layout=TokenLayout.whole(1, 2)), torch.ones(2)
    assert ctx.all_reduce(x, ("heads",)) is x
    assert not ctx.sharded(("heads",))
