"""Ctx: dropout as a function of (seed, path, sample, position, channel), and taps that do nothing without a listener."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dovetail.base.errors import InputError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx, Listener, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module
from dovetail.nn.ranks import Ranks
from dovetail.spec.part import KINDS
from dovetail.spec.scope import Scope

SPEC = from_yaml("""
width: 28
vocab: 62
dropout: 0.2
layers:
  - {repeat: 2, wire: {dropout: 0.2}, mixer: {heads: 6, kv_heads: 2, head: 12, dropout: 0.2}, ffn: {hidden: 44, dropout: 0.2}}
""")
TOKENS = torch.arange(21).reshape(3, 7)


class Site(Module):
    """Where a draw is made: a path, and an axis of 8 channels."""

    def __init__(self, path: str) -> None:
        nn.Module.__init__(self)
        self.path, self.scope = path, Scope({"embed": 8, "heads": 6})


class Half:
    """One of two ranks that share the channels and the heads."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def piece(self, pieces: int) -> int:
        return self.rank * pieces // 2


def dropped(seed: int, path: str, p: float = 0.3, layout: TokenLayout | None = None) -> Tensor:
    layout = layout or TokenLayout.whole(125, 100)
    x = torch.ones(*layout.order.shape, 8, dtype=torch.float64)
    return Draws(seed).dropout(Ctx(layout=layout), x, p, Site(path))


def test_the_same_draw_every_time_and_another_for_another_seed_or_path() -> None:
    first = dropped(1, "layers.0.mixer")
    assert torch.equal(first, dropped(1, "layers.0.mixer"))
    for seed, path in ((2, "layers.0.mixer"), (1, "layers.1.mixer")):
        agree = ((first > 0) == (dropped(seed, path) > 0)).double().mean().item()
        assert agree == pytest.approx(0.7**2 + 0.3**2, abs=0.01)  # as two independent draws


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_dropped_fraction_is_p_and_the_mean_stays(p: float) -> None:
    x = dropped(3, "here", p)
    assert (x == 0).double().mean().item() == pytest.approx(p, abs=0.01)
    assert x.mean().item() == pytest.approx(1.0, abs=0.03)
    assert set(x.unique().tolist()) == {0.0, 1.0 / (1.0 - p)}


def test_neighbors_are_dropped_independently() -> None:
    kept = (dropped(5, "here", 0.5) > 0).double().flatten()
    for lag in (1, 2, 8, 800):  # the next channel, pair, position and sample
        both = (kept[lag:] * kept[:-lag]).mean().item()
        assert both == pytest.approx(0.25, abs=0.01)


LENGTHS = (5, 1, 7)


def test_padded_packed_flat_and_alone_draw_the_same_mask() -> None:
    right, left = (dropped(1, "here", layout=TokenLayout.padded(LENGTHS, 9, left)) for left in (False, True))
    packed = dropped(1, "here", layout=TokenLayout.packed([LENGTHS[:2], LENGTHS[2:]], 9))
    flat = dropped(1, "here", layout=TokenLayout.flat(LENGTHS)).split(LENGTHS)
    for r, (n, row) in enumerate(zip(LENGTHS, (packed[0, :5], packed[0, 5:6], packed[1, :7]), strict=True)):
        alone = dropped(1, "here", layout=TokenLayout.whole(1, n).numbered(r))[0]
        for other in (right[r, :n], left[r, 9 - n :], flat[r], row):
            assert torch.equal(other, alone)


def test_a_pooled_output_draws_by_its_sample() -> None:
    def answers(count: int, layout: TokenLayout) -> Tensor:
        return Draws(1).dropout(Ctx(layout=layout), torch.ones(count, 8), 0.5, Site("head"))

    want = answers(3, TokenLayout.padded(LENGTHS, 9))
    assert torch.equal(answers(3, TokenLayout.packed([LENGTHS], 13)), want)
    assert torch.equal(answers(3, TokenLayout.flat(LENGTHS)), want)
    assert torch.equal(answers(1, TokenLayout.whole(1, 7).numbered(2)), want[2:])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_draws_its_slice_of_the_whole_mask(rank: int) -> None:
    layout = TokenLayout.padded(LENGTHS, 9)
    whole, part, draws = Ctx(layout=layout), Ctx(layout=layout, ranks=Ranks(Half(rank))), Draws(4)  # type: ignore[arg-type]
    x, probs, site = torch.ones(3, 9, 8), torch.ones(3, 6, 9, 9), Site("here")
    channels, heads = slice(4 * rank, 4 * rank + 4), slice(3 * rank, 3 * rank + 3)  # an odd number of heads, too
    assert torch.equal(draws.dropout(part, x[..., channels], 0.3, site), draws.dropout(whole, x, 0.3, site)[..., channels])
    assert torch.equal(draws.noise(part, x[..., channels], 0.3, site), draws.noise(whole, x, 0.3, site)[..., channels])
    want = draws.dropout_probs(whole, probs, 0.3, site, "pattern", layout, layout)
    assert torch.equal(draws.dropout_probs(part, probs[:, heads], 0.3, site, "pattern", layout, layout), want[:, heads])
    with pytest.raises(InputError, match="4 channels of embed = 8"):
        draws.dropout(whole, x[..., channels], 0.3, site)


def test_probs_are_dropped_by_the_positions_of_query_and_key() -> None:
    whole = TokenLayout.whole(2, 9)
    ctx, draws, site = Ctx(layout=whole), Draws(4), Site("here")
    want = draws.dropout_probs(ctx, torch.ones(2, 6, 9, 9), 0.3, site, "pattern", whole, whole)
    piece = whole.pick(slice(4, 7))
    got = draws.dropout_probs(ctx, torch.ones(2, 6, 3, 9), 0.3, site, "pattern", piece, whole)
    assert torch.equal(got, want[:, :, 4:7])
    assert (want == 0).double().mean().item() == pytest.approx(0.3, abs=0.05)
    assert len({tuple(head.flatten().tolist()) for row in want for head in row}) == 12


def test_dropout_is_drawn_in_training_alone_and_can_be_drawn_again() -> None:
    model = build(SPEC)
    layout = TokenLayout.whole(3, 7)
    evaluated, again = (model(TOKENS, Ctx(layout=layout)) for _ in range(2))
    trained, replayed, other = (model(TOKENS, Ctx(layout=TokenLayout.whole(3, 7), draws=Draws(seed))) for seed in (1, 1, 2))
    assert torch.equal(evaluated, again)
    assert torch.equal(trained, replayed)
    assert not torch.equal(trained, evaluated)
    assert not torch.equal(trained, other)
    assert Ctx(layout=layout).draws is None


def test_train_mode_draws_a_seed_that_manual_seed_reproduces() -> None:
    model, layout = build(SPEC), TokenLayout.whole(3, 7)
    assert not model.training
    evaluated = model(TOKENS, Ctx(layout=layout))
    model.train()
    torch.manual_seed(1)
    first, second = (model(TOKENS, Ctx(layout=layout)) for _ in range(2))
    torch.manual_seed(1)
    again = model(TOKENS, Ctx(layout=layout))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, evaluated)
    assert torch.equal(model.eval()(TOKENS, Ctx(layout=layout)), evaluated)


def test_a_loss_includes_the_router_losses_whoever_collects_them() -> None:
    spec = SPEC.swap("ffn", KINDS["moe"](experts=4, hidden=20, router=KINDS["softmax_router"](balance_loss=0.5)))
    model, layout, losses = build(spec), TokenLayout.whole(3, 7), {}
    collected = model.loss(TOKENS, TOKENS, Ctx(layout=layout, losses=Losses(losses)))
    assert len(losses) == 2
    assert collected - sum(losses.values()) < collected - 0.5
    in_training = model.loss(TOKENS, TOKENS, Ctx(layout=layout, losses=Losses(), draws=Draws(3)))
    assert torch.equal(model.loss(TOKENS, TOKENS, Ctx(layout=layout, draws=Draws(3))), in_training)
    alone = model.loss(TOKENS, TOKENS, Ctx(layout=layout))
    torch.testing.assert_close(alone, collected - sum(losses.values()), msg="router losses are losses of training")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_draw_is_the_same_when_compiled(backend: str) -> None:
    torch.compiler.reset()
    x, site = torch.ones(6, 50, 8), Site("layers.0.ffn")
    compiled = torch.compile(lambda x, ctx: ctx.draws.dropout(ctx, x, 0.3, site), backend=backend, fullgraph=True)
    for seed in (7, 8):
        ctx = Ctx(layout=TokenLayout.whole(6, 50), draws=Draws(seed))
        assert torch.equal(compiled(x, ctx), Draws(seed).dropout(ctx, x, 0.3, site))


def test_a_listener_gets_addresses_and_may_replace_values() -> None:
    model, taps = build(SPEC), []
    plain = model(TOKENS, Ctx(layout=TokenLayout.whole(3, 7)))
    listener = Listener({"layers.*.mixer.out": lambda address, x: taps.append((address, tuple(x.shape)))})
    assert torch.equal(model(TOKENS, Ctx(layout=TokenLayout.whole(3, 7), taps=listener)), plain)
    assert taps == [("layers.0.mixer.out", (3, 7, 28)), ("layers.1.mixer.out", (3, 7, 28))]
    silenced = model(
        TOKENS, Ctx(layout=TokenLayout.whole(3, 7), taps=Listener({"*.mixer_add": lambda _, x: torch.zeros_like(x)}))
    )
    assert not torch.equal(silenced, plain)


def test_without_ranks_all_reduce_is_the_identity() -> None:
    ctx, x = Ctx(layout=TokenLayout.whole(1, 2)), torch.ones(2)
    assert ctx.ranks.all_reduce(x, ("heads",)) is x
    assert not ctx.ranks.sharded(("heads",))
