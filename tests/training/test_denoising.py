"""Span corruption and denoising: what is corrupted, and that encoder–decoders learn from it."""

import itertools
import json
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, InputError, SpecError
from dovetail.data.corpus import Batch
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.training.denoising import Denoising, SpanCorruption, counts
from dovetail.training.plan import Plan
from dovetail.training.step import Trainer

SPEC = """
width: 28
vocab: 24
encoder:
  width: 28
  vocab: 24
  embed: {kind: tokens, shared: true}
  dropout: 0.1
  head: null
  layers: [{mixer: {heads: 2, mask: full}, ffn: {hidden: 44}}]
layers: [{mixer: {heads: 2}, cross: {kind: cross_attention, heads: 2}, ffn: {hidden: 44}}]
"""
SENTINELS = tuple(range(1, 20))
SPANS = SpanCorruption(end=0, sentinels=SENTINELS)
INFILL = Denoising(end=0, mask=1)


def text(rows: int, n: int) -> torch.Tensor:
    """Rows of distinct tokens from 100 on."""
    return (100 + torch.arange(n)).expand(rows, n).contiguous()


def restored(source: list[int], target: list[int]) -> list[int]:
    """The text, from the source and the spans of the target."""
    assert target[-1] == 0
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == list(SENTINELS[: len(spans)])
    assert all(spans.values())  # no span is empty
    return [one for token in source for one in spans.get(token, [token])]


def test_source_and_spans_are_the_text():
    for n in (2, 3, 7, 40, 100):
        source, real, target = SPANS.corrupt(text(6, n), TokenLayout.whole(6, n), 3)
        missing, spans = counts(n, 0.15, 3.0)
        assert real is None
        assert source.shape == (6, n - missing + spans)
        assert target.shape == (6, missing + spans + 1)
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            assert restored(one, other) == text(1, n)[0].tolist()
            assert not any(a in SENTINELS and b in SENTINELS for a, b in itertools.pairwise(one))


def test_spans_have_their_fraction_and_their_mean():
    assert counts(512, 0.15, 3.0) == (77, 26)  # of T5: 114 tokens of target for 512
    _, _, target = SpanCorruption(end=0, sentinels=tuple(range(1, 30))).corrupt(text(400, 512), TokenLayout.whole(400, 512), 1)
    assert target.shape[1] == 77 + 26 + 1
    hidden = torch.zeros(400, 512).scatter_add(1, (target - 100).clamp_min(0), (target >= 100).float())
    share = hidden.mean(0)
    assert share[10:-10].mean() == pytest.approx(0.15, abs=0.01)
    assert share[10:-10].std() < 0.03  # anywhere; a standard deviation of 400 draws is 0.018
    assert share[[0, -1]].min() > 0.02  # the first and the last token, too, which fewer spans reach
    sizes = (target[:, :-1] < 100).float().cumsum(-1)
    lengths = torch.bincount(torch.stack([(sizes == k).sum(-1) - 1 for k in range(1, 27)]).flatten())
    assert lengths[1] > 1000  # spans of one token
    assert lengths[6:].sum() > 500  # and long ones: lengths are random
    assert (lengths * torch.arange(len(lengths))).sum() / lengths.sum() == pytest.approx(77 / 26)


def test_infilling_replaces_spans_by_one_mask():
    n, rows = 200, 300
    source, real, target = INFILL.corrupt(text(rows, n), TokenLayout.whole(rows, n), 2)
    assert real is not None
    assert torch.equal(target, torch.cat([text(rows, n), torch.zeros(rows, 1, dtype=torch.long)], 1))
    sizes = []
    for one, there in zip(source.tolist(), real.tolist(), strict=True):
        assert not any(one[sum(there) :])  # padding is on the right
        shown = [token for token, is_there in zip(one, there, strict=True) if is_there]
        kept = [token for token in shown if token != 1]
        assert kept == sorted(kept)
        assert n - len(kept) == 60  # 30 % of the tokens are missing
        before = 99
        for token, following in zip(shown, [*shown[1:], 1], strict=True):
            if token != 1:
                before = token
            elif following != 1:  # a mask alone: the size of its span is known from the tokens around it
                sizes.append(following - before - 1)
    assert 0 in sizes  # a mask may be inserted
    alone = sum(size == 0 for size in sizes) / len(sizes)
    assert alone == pytest.approx(0.0498 / 1.0, abs=0.03)  # Poisson(3): e⁻³; some of the masks stand beside others
    masks = sum(int(((row == 1) & there).sum()) for row, there in zip(source, real, strict=True)) / rows
    assert masks == pytest.approx(60 / 3, rel=0.08)


def test_sentences_are_permuted_whole():
    ends = (104, 109, 114)
    permuting = Denoising(end=0, mask=1, fraction=1e-9, sentence_ends=ends)
    source, _, target = permuting.corrupt(text(50, 20), TokenLayout.whole(50, 20), 4)
    orders = set()
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        assert other[:-1] == text(1, 20)[0].tolist()
        starts = [token for token in one if token in (100, 105, 110, 115)]
        orders.add(tuple(starts))
        groups = [(token - 100) // 5 for token in one if token >= 100]
        assert sum(a != b for a, b in itertools.pairwise(groups)) <= 3  # each sentence is in one piece
    assert len(orders) > 10


@pytest.mark.parametrize("objective", [SPANS, INFILL], ids=["span corruption", "denoising"])
def test_pieces_of_a_batch_are_corrupted_as_the_whole(objective):
    tokens = torch.randint(2, 24, (6, 30), generator=torch.Generator().manual_seed(0))
    whole = Batch(tokens, tokens, TokenLayout.whole(6, 30))
    one = objective.corrupted(whole, 7)
    pieces = [objective.corrupted(piece, 7) for piece in whole.pieces(3)]
    for first, piece in enumerate(pieces):
        assert torch.equal(one.source[first::3], piece.source)
        assert torch.equal(one.labels[first::3], piece.labels)
    assert not torch.equal(one.source, objective.corrupted(whole, 8).source)
    alike = objective.corrupt(text(4, 100), TokenLayout.whole(4, 100), 7).source
    assert len({tuple(row) for row in alike.tolist()}) == 4  # every row has spans of its own
    # the gradients, dropout included, are those of the whole batch
    grads = []
    for count in (1, 3):
        model = build(from_yaml(SPEC))
        trainer = Trainer(model, objective, Plan(steps=1, micro_batches=count, quiet=True))
        trainer.step(whole, 0, 1e-9)
        grads.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    assert torch.allclose(grads[0], grads[1], atol=1e-6)


def test_rows_of_several_documents_are_refused():
    tokens = torch.ones(2, 8, dtype=torch.long)
    with pytest.raises(InputError, match="span_corruption: rows of one document each, without padding"):
        SPANS.corrupted(Batch(tokens, tokens, TokenLayout.packed([[3, 5], [8]], 8)), 0)
    with pytest.raises(InputError, match="sentinels: 19; 600 tokens in a row have 30 spans"):
        SPANS.corrupt(torch.ones(1, 600, dtype=torch.long), TokenLayout.whole(1, 600), 0)


ALPHABET = "abcdefghijkl"
SMALL = {"batch": 16, "length": 20, "tokenizer": "characters", "quiet": True, "learning_rate": 1e-2}


@pytest.fixture
def alphabet(tmp_path: Path) -> Path:
    (tmp_path / "alphabet.txt").write_text(ALPHABET * 300)
    return tmp_path / "alphabet.txt"


@pytest.mark.quick(1)
@pytest.mark.parametrize("objective", ["span_corruption", "denoising"])
def test_an_encoder_decoder_restores_text(alphabet, tmp_path, objective):
    """A missing letter follows from the letters that are left: the most frequent label is one of twelve."""
    notes = []
    run = dt.train(SPEC, alphabet, steps=80, out=tmp_path / "run", objective=objective, note=notes.append, **SMALL)
    told = run.to_dict()
    assert told["held_out_accuracy"] > 0.75
    assert told["held_out_perplexity"] < 3
    assert "held_out_bits_per_byte" not in told
    assert "sample" not in told
    settings = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert settings == {"decoder_start_token_id": 0, "eos_token_id": 0}
    # the model restores text: without the source it cannot know which letter comes first
    model = dt.load(tmp_path / "run")
    assert model.tokenizer is not None
    hole = "<extra_id_0>" if objective == "span_corruption" else "<|mask|>"
    answers = [model.generate(f"{ALPHABET[k:]}{ALPHABET[: k - 3]}{hole}", max_tokens=12) for k in (4, 7, 9)]
    wanted = [(ALPHABET * 2)[k + 9 : k + 12] for k in (4, 7, 9)]
    hits = sum(want[0] in answer for want, answer in zip(wanted, answers, strict=True))
    assert hits >= 2, answers
    again = dt.train(
        SPEC, alphabet, steps=80, out=tmp_path / "run", objective=objective, **SMALL
    )  # complete: nothing is trained
    assert again.to_dict()["held_out_accuracy"] == told["held_out_accuracy"]
    with pytest.raises(FileError, match="holds another run"):
        dt.train(SPEC, alphabet, steps=80, out=tmp_path / "run", **(SMALL | {"length": 16}), objective=objective)


def test_token_shards_are_corrupted_without_their_boundaries(tmp_path):
    (tmp_path / "tales.jsonl").write_text("".join(json.dumps({"text": f"There were {i} hens."}) + "\n" for i in range(90)))
    dt.build_data([str(tmp_path / "tales.jsonl")], out=tmp_path / "tales", tokenizer="bytes", held_out=0.2, workers=1)
    sizes = {"batch": 4, "length": 40, "steps": 3, "quiet": True}
    wide = ["vocab=260", "encoder.vocab=260"]
    run = dt.train(SPEC, data=str(tmp_path / "tales"), set=wide, **sizes)
    assert run.tokenizer is not None
    assert run.tokenizer.size == 260  # 258 and two sentinels, for the two spans of 40 tokens
    assert run.held_out_loss is not None
    narrow = ["vocab=259", "encoder.vocab=259"]
    with pytest.raises(SpecError, match=r"vocab: 259; the tokenizer of .* has 260 tokens, with 2 that the objective adds"):
        dt.train(SPEC, data=str(tmp_path / "tales"), set=narrow, **sizes)


def test_span_corruption_is_the_objective_of_an_encoder_decoder(alphabet):
    notes = []
    run = dt.train(SPEC, alphabet, steps=1, note=notes.append, **SMALL)
    assert "predicting the missing spans" in notes[-1]
    assert run.tokenizer is not None
    assert run.tokenizer.id_of("<extra_id_0>") == run.tokenizer.size - 1  # 20 tokens have one span
