from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import IDS, MIXED, MODEL

import dovetail as dt
from dovetail.base.errors import FileError, InputError, SpecError
from dovetail.files.spec import from_yaml
from dovetail.look.lenses import TunedLens, lens, tuned_lens
from dovetail.look.residual import unembed
from dovetail.look.tracer import trace
from dovetail.proof.laws.case import perturbed


@pytest.mark.parametrize("model", [MODEL, MIXED], ids=["attention", "hybrid"])
def test_the_last_point_is_the_model_and_others_are_the_unembedded_stream(model: dt.ModelModule) -> None:
    result = lens(model, IDS, top=3)
    run = trace(model, IDS, "head.logits", "layers.1.in")
    probs = run["head.logits"].softmax(-1)
    torch.testing.assert_close(result.probs[-1], probs.topk(3).values)
    assert torch.equal(result.target, probs.argmax(-1))
    assert result.rank[-1].abs().max() == 0
    assert result.kl[-1].abs().max() == 0
    inner = unembed(model, run["layers.1.in"], dt.Ctx(layout=dt.TokenLayout.whole(2, 9))).log_softmax(-1)
    torch.testing.assert_close(result.kl[1], (probs * (probs.log() - inner)).sum(-1))
    torch.testing.assert_close(result.prob[1], inner.gather(-1, result.target[..., None])[..., 0].exp())
    assert torch.equal(result.rank[1], (inner > inner.gather(-1, result.target[..., None])).sum(-1))
    assert repr(result).splitlines()[2].startswith("layers.0.in")


def test_a_target_of_ones_own() -> None:
    result = lens(MODEL, IDS, target=7)
    assert torch.equal(result.tokens[result.rank == 0][:, 0], torch.full((int((result.rank == 0).sum()),), 7))
    assert result.prob.shape == (4, 2, 9)


def test_a_tuned_lens_is_nearer_and_belongs_to_its_model(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 62, (8, 16), generator=generator) for _ in range(8)]
    history: list[float] = []
    before = [parameter.grad for parameter in MODEL.parameters()]  # of other tests
    tuned = tuned_lens(MODEL, batches, steps=40, lr=3e-3, progress=lambda _, kl: history.append(kl))
    assert history[-1] < 0.8 * history[0]
    plain, better = lens(MODEL, batches[0]), lens(MODEL, batches[0], tuned=tuned)
    assert better.kl[0].mean() < plain.kl[0].mean()
    assert torch.equal(better.kl[-1], plain.kl[-1])
    assert all(parameter.grad is grad for parameter, grad in zip(MODEL.parameters(), before, strict=True))
    path = tmp_path / "lens.safetensors"
    tuned.save(path)
    again = TunedLens.load(path, MODEL)
    assert torch.equal(lens(MODEL, IDS, tuned=again).kl, lens(MODEL, IDS, tuned=tuned).kl)
    with pytest.raises(FileError, match="belongs to a model with other weights"):
        TunedLens.load(path, MIXED)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FileError, match="is damaged"):
        TunedLens.load(path, MODEL)


def test_streams_that_are_several_are_closed_first() -> None:
    model = perturbed(from_yaml("{width: 28, vocab: 62, layers: [{repeat: 2, wire: mhc, mixer: {heads: 2}}]}"))
    assert lens(model, IDS).kl.shape == (3, 2, 9)


def test_a_model_without_logits_has_no_lens() -> None:
    model = perturbed(from_yaml("{width: 28, vocab: 62, head: {kind: classifier, classes: 3}, layers: [{mixer: {heads: 2}}]}"))
    with pytest.raises(SpecError, match="gives no logits over the vocabulary"):
        lens(model, IDS)
    with pytest.raises(InputError, match="top: 63 is not from 1 to 62"):
        lens(MODEL, IDS, top=63)
    with pytest.raises(InputError, match="batches: there are none"):
        tuned_lens(MODEL, [])
