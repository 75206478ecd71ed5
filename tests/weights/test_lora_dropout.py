"""LoRA dropout: values by hand, draws by coordinates (rows alone, micro-batches, recomputation), off outside training, and no
exact matrix in training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import InputError, SpecError
from dovetail.nn.ctx import Ctx
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.linear import offers
from dovetail.proof.laws.adapted import perturb
from dovetail.proof.laws.mutant import spec
from dovetail.training.recompute import recomputed
from dovetail.weights.adapters.attach import attach, detach, merge

P = 0.3
IDS = torch.arange(24).view(3, 8) % 62
EXPERTS = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
LATENT = spec().set("layers.*.mixer", {"kind": "mla", "heads": 6, "kv_rank": 5, "nope": 6, "rope": 8, "value": 7})
SHARED = spec().set("layers.1.shares", 0)


def adapted(of: dt.Model | None = None, dropout: float = P, **fields: Any) -> dt.Transformer:
    model = dt.build(of or spec(), dtype="float64")
    attach(model, {"kind": "lora", "rank": 3, "alpha": 5.0, "dropout": dropout, **fields})
    perturb(model, 1)
    return model


def ctx(rows: int = 3, seed: int | None = 4) -> Ctx:
    return Ctx(layout=TokenLayout.whole(rows, IDS.shape[1]), draws=None if seed is None else Draws(seed))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_outside_training_there_is_no_dropout_and_merged_equals_unmerged(kind: str) -> None:
    model, plain = adapted(kind=kind), adapted(dropout=0.0, kind=kind)
    assert torch.equal(model(IDS), plain(IDS))
    want = model(IDS)
    assert (model(IDS, ctx()) - want).abs().max() > 1e-3, "in training there is"
    assert torch.equal(plain(IDS, ctx()), want)
    merge(model)
    torch.testing.assert_close(model(IDS), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", ["layers.0.mixer.o", "layers.1.ffn.bank.up"])
def test_values_are_dropped_or_scaled(which: str) -> None:
    """With A = I the change that B makes is that of d ⊙ x: each value of x is 0 or x/(1 − p)."""
    model = dt.build(EXPERTS, dtype="float64")
    leaf = model.get_submodule(which)
    attach(model, {"kind": "lora", "rank": leaf.in_features, "alpha": float(leaf.in_features), "dropout": P, "targets": which})
    adapter = leaf.adapter
    with torch.no_grad():
        adapter.a.copy_(torch.eye(leaf.in_features))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    dropped = adapter.dropped
    adapter.dropped = lambda leaf, x, *rest: seen.append((x, dropped(leaf, x, *rest))) or seen[-1][1]
    model(IDS, ctx())
    (x, y), zero = seen[0], seen[0][1] == 0
    torch.testing.assert_close(y[~zero], x[~zero] / (1 - P), rtol=1e-12, atol=0)
    assert abs(zero.double().mean().item() - P) < 4 * (P * (1 - P) / zero.numel()) ** 0.5
    model(IDS, ctx())
    model(IDS, ctx(seed=5))
    assert torch.equal(seen[1][1] == 0, zero)
    assert not torch.equal(seen[2][1] == 0, zero)


@pytest.mark.parametrize("of", [spec(), EXPERTS, LATENT], ids=["llama", "experts", "mla"])
def test_rows_alone_draw_what_they_draw_in_a_batch(of: dt.Model) -> None:
    model = adapted(of)
    whole = model(IDS, ctx())
    assert (whole - model(IDS, ctx(seed=None))).abs().max() > 1e-3
    assert (whole - model(IDS, ctx(seed=9))).abs().max() > 1e-3
    for row in range(len(IDS)):
        alone = Ctx(layout=TokenLayout.whole(1, IDS.shape[1]).numbered(row), draws=Draws(4))
        torch.testing.assert_close(model(IDS[row : row + 1], alone)[0], whole[row], rtol=1e-9, atol=1e-9)


def test_layers_that_share_an_adapter_draw_apart() -> None:
    model, masks = adapted(SHARED, targets=["layers.*.mixer.q"]), list[torch.Tensor]()
    adapter = model.layers[0].mixer.q.adapter
    assert adapter is model.layers[1].mixer.q.adapter
    dropped = adapter.dropped
    adapter.dropped = lambda *given: masks.append(dropped(*given) == 0) or dropped(*given)
    model(IDS, ctx())
    assert len(masks) == 2
    assert not torch.equal(*masks)


def test_a_recomputed_block_draws_the_same() -> None:
    def gradients(again: bool) -> list[torch.Tensor]:
        model = adapted()
        for block in model.layers if again else ():
            recomputed(block, "blocks")
        model.loss_sum(IDS, IDS, ctx()).sum.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, other)


def test_in_training_there_is_no_exact_matrix() -> None:
    model = adapted(LATENT)
    mixer = model.layers[0].mixer
    assert offers("matrix", ctx(seed=None), mixer.k_up, mixer.v_up)
    assert not offers("matrix", ctx(), mixer.k_up, mixer.v_up), "a seed is training"
    assert offers("grouped", ctx(), mixer.k_up)
    seen = list[bool]()
    absorbing = mixer.absorbing
    mixer.absorbing = lambda n, m, ctx: seen.append(offers("matrix", ctx, mixer.k_up)) or absorbing(n, m, ctx)
    model(IDS, ctx())
    model(IDS)
    assert seen == [False, True]
    mixer.absorbing = lambda n, m, ctx: True  # a part that does not ask
    with pytest.raises(InputError, match=r"layers\.0\.mixer\.k_up: has no one matrix in training with dropout"):
        model(IDS, ctx())


def test_a_copy_and_an_undone_merge_drop_and_a_detached_model_does_not() -> None:
    model = adapted()
    want = model(IDS, ctx())
    assert torch.equal(copy.deepcopy(model)(IDS, ctx()), want)
    merge(model).undo()
    assert torch.equal(model(IDS, ctx()), want)
    detach(model)
    assert torch.equal(model(IDS, ctx()), model(IDS))


def test_a_leaf_without_a_ctx_or_with_other_inputs_is_refused_in_training() -> None:
    model = adapted(targets=["head.out"])
    assert torch.isfinite(model.loss(IDS)), "outside training it runs"
    assert torch.isfinite(model.head.out(torch.zeros(2, 28, dtype=torch.float64))).all()
    with pytest.raises(InputError, match=r"head\.out: its inputs"):
        model.train().loss(IDS)
    with pytest.raises(InputError, match=r"head\.out: dropout is drawn by the seed of a pass, and this leaf is called without"):
        model.head.out(torch.zeros(2, 28, dtype=torch.float64))
    with pytest.raises(SpecError, match=r"dropout: 1\.0 is not"):
        adapted(dropout=1.0)


def test_micro_batches_train_to_the_same_weights(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("It was the best of times, it was the worst of times.\n" * 60)
    small = "{width: 28, vocab: 270, layers: [{mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
    short: dict[str, Any] = {"batch": 4, "length": 16, "steps": 3, "sample": 0, "quiet": True}
    dt.train(small, text, out=tmp_path / "base", **short)
    kind = {"kind": "lora", "rank": 4, "dropout": 0.4}
    runs = [
        dt.train(None, text, from_=tmp_path / "base", adapter=kind, micro_batches=pieces, out=tmp_path / str(pieces), **short)
        for pieces in (1, 2)
    ]
    assert runs[0].history[-1].loss == pytest.approx(runs[1].history[-1].loss, rel=1e-5)
    plain = dt.train(None, text, from_=tmp_path / "base", adapter={**kind, "dropout": 0.0}, **short)
    assert abs(plain.history[-1].loss - runs[0].history[-1].loss) > 1e-4
    model = dt.load(tmp_path / "1")
    dt.save_adapter(model, tmp_path / "peft", base=tmp_path / "base", layout="peft")
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_dropout"] == 0.4
    again = dt.load(tmp_path / "base", adapter=tmp_path / "peft")
    assert again.layers[0].mixer.q.adapter.kind.dropout == 0.4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about torch
@pytest.mark.timeout(900)
def test_a_compiled_block_draws_the_same_and_no_graph_is_compiled_for_a_seed() -> None:
    of = dt.from_yaml("{width: 24, vocab: 62, layers: [{mixer: {heads: 4, kv_heads: 2}, ffn: {hidden: 44}}]}")

    def run(compiled: bool) -> list[torch.Tensor]:
        model, found = adapted(of).train(), list[torch.Tensor]()
        for block in model.layers if compiled else ():
            block.compile(fullgraph=True)
        for seed in (4, 5, 6, 7):
            loss = model.loss_sum(IDS, IDS, ctx(seed=seed)).sum
            loss.backward()
            found.append(loss.detach())
        return [*found, *(p.grad for p in model.parameters() if p.requires_grad)]

    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        compiled = run(True)
    eager = run(False)
    assert len({loss.item() for loss in eager[:4]}) == 4, "each seed draws another mask"
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
